"""Choose tokens: clusters, pages, and reading the chosen."""
