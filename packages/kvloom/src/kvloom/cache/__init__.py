"""The cache of one layer, composed of the parts that a recipe needs."""
