"""The papers' plots by command: what a model's attention looks like, and what a recipe does to it.

    from kvloom.analyse import attention
    layers = attention.measure(model, ids, context=1024, recipe="h2o")      # ids int64 [1, tokens]

One module a question; `attention_report` shows what `attention` measured.
"""
