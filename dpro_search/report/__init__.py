"""The report: one HTML page that needs nothing else, made of what the other packages found."""

from dpro_search.report.facts import Facts
from dpro_search.report.page import render

__all__ = ["Facts", "render"]
