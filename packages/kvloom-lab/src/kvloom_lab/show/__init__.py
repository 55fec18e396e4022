"""How results are shown: tables, plots, pages, errors, and the machine they were measured on."""
