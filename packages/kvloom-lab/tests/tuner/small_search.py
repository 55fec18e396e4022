"""A search of the tuner that takes a second."""

from kvloom_lab.tuner import candidates
from kvloom_lab.tuner.candidates import FORMATS, KEPT


def few(monkeypatch):
    """Leave a few candidates: a pass is then as fast as its model."""
    keys = {name: FORMATS["keys"][name] for name in ("exact", "rotated-2", "rotated-4")}
    values = {name: FORMATS["values"][name] for name in ("exact", "turbo-2", "turbo-4")}
    kept = {x: KEPT[x] for x in ("all", "kvzip-0.5", "kvzip-0.2", "snapkv-0.5")}
    monkeypatch.setattr(candidates, "FORMATS", {"keys": keys, "values": values})
    monkeypatch.setattr(candidates, "KEPT", kept)
