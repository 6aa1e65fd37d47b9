"""Networks as data: hosts, links, regions, routes, and where ranks are placed."""
