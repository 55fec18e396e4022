"""Formats of other papers as a distribution of their own: an example of kvloom's extension API."""
