"""The report: one HTML page that needs nothing else, made of what the other packages found."""

from dpro_search.report.facts import PageFacts
from dpro_search.report.page import render

__all__ = ["PageFacts", "render"]
