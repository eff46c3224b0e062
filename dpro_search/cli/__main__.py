"""`python -m dpro_search.cli`: the same as the command `dpro-search`."""

from dpro_search.cli import main

main()
