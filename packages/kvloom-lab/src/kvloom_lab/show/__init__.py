"""How results are shown: tables, plots and pages."""
