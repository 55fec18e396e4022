"""Compare recipes on one model and one text: memory, speed, perplexity, agreement, needles.

`task` decides what is measured, and `needles` hides facts and asks questions about them. `measure`
measures one recipe, and `compare` a list of them. `rows`, `table` and `plot` show the result.
"""
