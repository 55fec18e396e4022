"""The inputs of commands: models, texts, one timed forward pass, caches filled without a prompt."""
