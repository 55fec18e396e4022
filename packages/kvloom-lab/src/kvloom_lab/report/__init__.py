"""How results are shown: tables, plots, error messages, and the machine they were measured on."""
