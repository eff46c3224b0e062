"""The Python interface behind `dpro_search.api`: recordings, searches, and the values that they return."""
