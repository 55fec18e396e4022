"""The papers' analyses: how a model's attention is distributed, and how a recipe changes it.

    from kvloom_lab.analyse import attention
    layers = attention.measure(model, ids, context=1024, recipe="h2o")      # ids int64 [1, tokens]

`attention`, `error` and `distribution` measure one question each and convert the result to plain
data; `show` draws it.
"""
