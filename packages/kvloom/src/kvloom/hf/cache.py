"""`Cache`: a compressed cache for a model, built from a recipe."""

from __future__ import annotations

from html import escape
from pathlib import Path
from weakref import WeakMethod

from transformers import PreTrainedModel

from ..cache.build import build_layers
from ..cache.layer import LayerCache
from ..cache.rehearsal import Rehearsal
from ..kernels import companion
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from . import compat, rotary, save, self_check, shard
from .guard import ModelRef
from .hybrid import with_compressed
from .implementation import other_attention
from .layer_facts import load_layer_facts, recipe_for
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer
from .routing import route
from .supported import supported_model


class Cache(RoutedCache):
    """A compressed cache for `model.generate(past_key_values=cache)` and `model(...)`.

    The model's attention goes through kvloom from then on, which changes nothing for other caches;
    `kvloom.detach` undoes it. A step that fails or is interrupted is undone in all layers. One
    thread may use a cache at a time: a second one raises `CacheMisuse`.

    Args:
        model: Any supported model, also inside the wrapper of peft or `torch.compile`.
        recipe: A `Recipe`, its name with overrides ("kivi:bits=4,group=64"), or a TOML file.
        check: Whether to compare the logits of a short random batch with those of the plain model.
            This runs once per model, if no test of kvloom covers its class with this transformers.
            False also admits the model to later calls.

    Raises:
        UnsupportedModel: kvloom cannot route the model. These errors are raised before the model
            changes.
        RecipeError: There is no such recipe.
        IncompatibleRecipe: The recipe does not fit the model.
    """

    may_record = True

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe | str | Path = "near-lossless",
        check: bool = True,
    ) -> None:
        model = supported_model(model)
        self.recipe, self.owner = resolve(recipe), ModelRef(model)
        self.geometry = compat.geometry(model)
        self.recipe.check(self.geometry)
        adapted = recipe_for(model, self.recipe)
        facts = load_layer_facts(model, adapted)
        ropes, learned = rotary.renumbering(model, adapted)
        self_check.admit(model, type(self), check)
        layer_indices = self.geometry.layer_indices
        built = build_layers(adapted, layer_indices, facts, ropes)
        divided = shard.running()
        heads = self.geometry.kv_heads if divided else None
        shared = compat.shared_layers(model)
        layers = compat.stock_layers(model)
        for i, compressed in zip(layer_indices, built, strict=True):
            layers[i] = with_compressed(layers[i], RoutedLayer(compressed, heads, i in shared))
        for layer in self.geometry.sliding if self.recipe.packs_windows else ():
            i, heads = layer.layer_index, layer.geometry.kv_heads if divided else None
            window = LayerCache(self.recipe.in_windows, f"layer {i}", window=layer.window)
            layers[i] = with_compressed(layers[i], RoutedLayer(window, heads))
        super().__init__(layers, compat.config_key(model))
        self.learned_positions = learned
        self.other_attention = other_attention(compat.decoder_config(model))
        route(model)
        companion.expect(WeakMethod(self.rehearsals))

    def __repr__(self) -> str:
        """Return the recipe, the tokens seen and the bytes."""
        texts = self._texts
        return (
            f"Cache({texts['recipe']}: {texts['tokens']} tokens, {texts['bytes']} bytes instead of "
            f"{texts['bytes of an exact cache']})"
        )

    def _repr_html_(self) -> str:
        """Return the same as a table, for notebooks."""
        cells = (f"<tr><th>{name}</th><td>{escape(x)}</td></tr>" for name, x in self._texts.items())
        return f"<table>{''.join(cells)}</table>"

    @property
    def _texts(self) -> dict[str, str]:
        """What `repr` shows, by name."""
        likes = (layer.cache.like for layer in self.full_layers)
        rows = next((len(like) for like in likes if like is not None), 1)
        return {
            "recipe": self.recipe.name,
            "tokens": f"{rows} x " * (rows > 1) + f"{self.get_seq_length():,}",
            "bytes": f"{self.nbytes:,}",
            "bytes of an exact cache": f"{self.full_nbytes:,}",
        }

    def rehearsals(self) -> list[Rehearsal]:
        """Return layers of full attention that need all kernels of the cache's steps."""
        layers = [layer.cache for layer in self.full_layers]
        by_recipe: dict[str, list[int]] = {}
        for place, layer in enumerate(layers):
            by_recipe.setdefault(repr(layer.recipe), []).append(place)
        shape = self.geometry
        return [
            Rehearsal(
                layers[place].recipe, place, len(layers), layers[place].rope, layers[place].facts,
                shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype,
            )
            for places in by_recipe.values()
            for place in {places[0], places[-1]}  # recall may begin after the first
        ]  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the cache to a safetensors file of about `nbytes`, whole or not at all.

        The file has a checksum, which tokens were padding, and no weights or token ids.

        Args:
            path: The file. Under tensor parallelism each rank saves its own heads to another path.

        Raises:
            SavedCacheError: The file cannot be written.
            CacheMisuse: A step failed, or `crop` may still remove tokens.
        """
        with self.guard.step():
            self._store_waiting()
            save.save(self, Path(path))

    @classmethod
    def load(cls, model: PreTrainedModel, path: str | Path) -> Cache:
        """Return the cache in a file that `save` wrote; it continues exactly as the saved one.

        Args:
            model: The model of the saved cache.
            path: The file.

        Returns:
            A cache on the model's device.

        Raises:
            SavedCacheError: The file is damaged, or of another model, dtype, calibration or format.
                Nothing is changed then.
            UnsupportedModel: The model cannot be identified.
        """
        loaded = save.load(cls, model, path)
        assert isinstance(loaded, cls)
        return loaded
