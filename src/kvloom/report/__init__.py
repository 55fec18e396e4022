"""How commands show results: tables, and the machine that they were measured on."""
