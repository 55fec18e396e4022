"""How the reference model was trained, measured and described; not part of the package."""
