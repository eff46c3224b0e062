"""`expect`: is a measured job normal, and if not, why; see `expectation.expect`."""

from dpro_search.analysis.expect.answer import Cause as Cause
from dpro_search.analysis.expect.answer import Expectation as Expectation
from dpro_search.analysis.expect.expectation import expect as expect
