"""The deliberate defects of `seed_defects`: subtle, and none of them a crash.

Each names the file, the text that it replaces (found exactly once), the new text, why it matters,
and the tests that are likely to catch it, as arguments of pytest.
"""

from __future__ import annotations

from typing import NamedTuple


class Defect(NamedTuple):
    """One change of one place, and what is likely to catch it."""

    part: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]


def _defect(part: str, file: str, old: str, new: str, why: str, *tests: str) -> Defect:
    return Defect(part, f"packages/kvloom/src/kvloom/{file}", old, new, why, tests)


DEFECTS = [
    # --- keep --------------------------------------------------------------------------------
    _defect(
        "keep", "keep/select.py",
        "older = scores[..., : n - recent]",
        "older = scores[..., : n - recent - 1]",
        "the token just before the recent window can never be a heavy hitter",
        "packages/kvloom/tests/unit/keep/test_choose.py", "packages/kvloom/tests/papers/test_eviction.py",
    ),
    _defect(
        "keep", "keep/select.py",
        "older.masked_fill(~visible[..., : n - recent], -torch.inf)",
        "older.masked_fill(~visible[..., recent:], -torch.inf)",
        "the padding mask is read from the wrong end, so real tokens go and padding stays",
        "packages/kvloom/tests/unit/keep/test_choose.py", "packages/kvloom/tests/laws/test_scored.py",
    ),
    _defect(
        "keep", "keep/select.py",
        "visible & (visible.cumsum(dim=-1) <= count)",
        "visible & (visible.cumsum(dim=-1) < count)",
        "a padded row protects one sink fewer than a row without padding",
        "packages/kvloom/tests/unit/keep/test_choose.py", "packages/kvloom/tests/laws/test_scored.py",
    ),
    _defect(
        "keep", "keep/scorers.py",
        "return (former if self.damping == 1 else former * self.damping) + new",
        "return (former if self.damping == 1 else former + new * (self.damping - 1)) + new",
        "damping scales the mass of the step instead of what a token had",
        "packages/kvloom/tests/unit/keep/test_scorers.py", "packages/kvloom/tests/laws/test_scored.py",
    ),
    _defect(
        "keep", "keep/scorers.py",
        "parts = mass.tensor_split([max(0, mass.shape[-1] - self.window)], dim=-1)",
        "parts = mass.tensor_split([max(0, mass.shape[-1] - self.kernel)], dim=-1)",
        "SnapKV's votes are pooled across the edge of its observation window",
        "packages/kvloom/tests/papers/test_kept_tokens.py",
    ),
    _defect(
        "keep", "keep/scorers.py",
        "part = min(1.0, step.number / self.steps)",
        "part = min(1.0, (step.number + 1) / self.steps)",
        "Keyformer's temperature rises one step early",
        "packages/kvloom/tests/unit/keep/test_scorers.py", "packages/kvloom/tests/papers/test_eviction.py",
    ),
    _defect(
        "keep", "keep/scorer.py",
        "self.visible_queries[:, :, skip:]",
        "self.visible_queries[:, :, : t - skip]",
        "which queries of an observation window are padding is read from the oldest ones",
        "packages/kvloom/tests/unit/keep/test_scorers.py", "packages/kvloom/tests/laws/test_scored.py",
    ),
    _defect(
        "keep", "keep/budgets.py",
        "key=lambda i: math.floor(exact[i]) - exact[i]",
        "key=lambda i: exact[i] - math.floor(exact[i])",
        "what rounding leaves goes to the layers with the smallest remainders",
        "packages/kvloom/tests/unit/keep/test_layer_budgets.py", "packages/kvloom/tests/papers/test_kept_tokens.py",
    ),
    # --- store -------------------------------------------------------------------------------
    _defect(
        "store", "store/formats.py",
        "max(0, tokens - recent) // block * block",
        "max(0, tokens - recent - (not prompt)) // block * block",
        "a decode step packs one token later than a prompt of the same length",
        "packages/kvloom/tests/papers/test_kivi.py", "packages/kvloom/tests/laws/test_sequence.py",
    ),
    _defect(
        "store", "store/formats.py",
        "self.unit if prompt and self.unit else",
        "self.unit if self.unit and (prompt or tokens - recent >= self.residual) else",
        "steps behind the first prompt pack whole units, so that their cut decides",
        "packages/kvloom/tests/laws/test_sequence.py",
    ),
    _defect(
        "store", "kernels/quantize/encoding.py",
        "(0 if self.static else 2 if self.zeros else 1)",
        "(0 if self.static else 2)",
        "rotated groups are predicted to hold a zero point that they do not hold",
        "packages/kvloom/tests/unit/store/test_packed.py", "packages/kvloom/tests/laws/test_budgets.py",
    ),
    _defect(
        "store", "kernels/quantize/encoding.py",
        "largest /= 1.5 if self.pre_rope else 1.0",
        "largest /= 1.0",
        "a key that fits before RoPE may overflow its scale once it is rotated",
        "packages/kvloom/tests/laws/test_pre_rope.py",
    ),
    _defect(
        "store", "kernels/quantize/encoding.py",
        "return (torch.arange(heads * head_dim) // group).view(heads, head_dim)",
        "return (torch.arange(heads * head_dim) // group).view(head_dim, heads).T",
        "groups of a layer run along heads instead of along the channels of a head",
        "packages/kvloom/tests/laws/test_pre_rope.py", "packages/kvloom/tests/papers/test_skvq.py",
    ),
    _defect(
        "store", "kernels/quantize/reference.py",
        "unit = math.lcm(each, per_block)",
        "unit = each",
        "a stretch that begins inside a pack block is unpacked from the wrong codes",
        "packages/kvloom/tests/unit/store/test_packed.py",
    ),
    _defect(
        "store", "store/calibration.py",
        "max_abs = torch.maximum(low.abs(), high.abs())",
        "max_abs = torch.maximum(low, high).abs()",
        "a channel of mostly negative numbers is divided by too little",
        "packages/kvloom/tests/unit/store/test_calibration.py", "packages/kvloom/tests/models/test_calibrate.py",
    ),
    _defect(
        "store", "store/calibration.py",
        'return "raw_keys" if fmt.pre_rope else side',
        "return side",
        "keys packed before RoPE get the calibration of keys after it",
        "packages/kvloom/tests/unit/store/test_calibration.py", "packages/kvloom/tests/models/test_calibrate.py",
    ),
    _defect(
        "store", "store/calibration.py",
        "highs = high.new_full((groups,), -torch.inf)",
        "highs = high.new_full((groups,), 0.0)",
        "the static range of a group of negative channels reaches up to 0",
        "packages/kvloom/tests/unit/store/test_calibration.py", "packages/kvloom/tests/models/test_calibrate.py",
    ),
    # --- recall ------------------------------------------------------------------------------
    _defect(
        "recall", "recall/partial_keys.py",
        "mass.topk(self.options.channels(d), dim=-1)",
        "mass.topk(self.options.channels(d), dim=-1, largest=False)",
        "the index stores the channels that say least",
        "packages/kvloom/tests/papers/test_recall.py", "-k", "partial",
    ),
    _defect(
        "recall", "kernels/attend/reference.py",
        "layer_encoding is None or not layer_encoding.encoding.plain or where.begin > packed.hi",
        "layer_encoding is None or where.begin > packed.hi",
        "without a kernel, recalled keys stay rotated",
        "packages/kvloom/tests/laws/test_recalled.py", "-k", "rotated",
    ),
    _defect(
        "recall", "cache/step.py",
        "torch.cat([old, x], dim=1)",
        "torch.cat([x, old], dim=1)",
        "a filter rule reads the ids of a prompt in pieces in the wrong order",
        "packages/kvloom/tests/extend/test_filter.py",
    ),
    _defect(
        "recall", "recall/pages.py",
        "bounds = ops.page_bounds(keys, self.page, nonpadding)",
        "bounds = ops.page_bounds(keys, self.page, None)",
        "padding widens the bounds of its page",
        "packages/kvloom/tests/unit/recall/test_pages.py", "packages/kvloom/tests/laws/test_recalled.py", "-k", "padding",
    ),
    _defect(
        "recall", "recall/partial_keys.py",
        "scores = scores.masked_fill(~self.real, -torch.inf)",
        "scores = scores.masked_fill(~self.real, 0.0)",
        "the exact top k prefers padding to tokens with a negative product",
        "packages/kvloom/tests/unit/recall/test_pages.py", "packages/kvloom/tests/laws/test_recalled.py", "-k", "padding or topk",
    ),
    _defect(
        "recall", "recall/clusters.py",
        "begin = size.cumsum(dim=-1) - size + self.tokens",
        "begin = size.cumsum(dim=-1) - size",
        "clusters of a later block point to the tokens of the first one",
        "packages/kvloom/tests/laws/test_recalled.py", "-k", "clusters",
    ),
    _defect(
        "recall", "recall/clusters.py",
        "alive = torch.arange(clusters, device=keys.device) < count.unsqueeze(-1)",
        "alive = torch.arange(clusters, device=keys.device) <= count.unsqueeze(-1)",
        "a row with few tokens has one cluster too many",
        "packages/kvloom/tests/laws/test_recalled.py", "packages/kvloom/tests/papers/test_recall.py", "-k", "clusters or padding",
    ),
    _defect(
        "recall", "recall/clusters.py",
        "return self.block if waiting >= self.block else 0",
        "return self.block if waiting > self.block else 0",
        "a block of decoded tokens is clustered one step late",
        "packages/kvloom/tests/papers/test_recall.py", "packages/kvloom/tests/laws/test_recalled.py",
    ),
    _defect(
        "recall", "recall/offload.py",
        "replaced = (places >= lo) & (places < lo + m)",
        "replaced = places >= lo",
        "tokens that a newer step has read are copied again",
        "packages/kvloom/tests/laws/test_tiers.py",
    ),
    _defect(
        "recall", "recall/offload.py",
        '("resident", "resident_index", "read_slots")',
        '("resident", "resident_index")',
        "after a beam search moved rows, stale slots are taken off the device",
        "packages/kvloom/tests/laws/test_tiers.py", "packages/kvloom/tests/laws/test_recalled.py",
    ),
    _defect(
        "recall", "recall/offload.py",
        'self._addresses(slots[which].to("cpu"), row, head // per)',
        'self._addresses(slots[which].to("cpu"), row, head % self.like.shape[1])',
        "a query head that chooses alone gets tokens of another key/value head",
        "packages/kvloom/tests/laws/test_tiers.py",
    ),
    # --- cache -------------------------------------------------------------------------------
    _defect(
        "cache", "cache/sinks.py",
        "(index < begin) | (index >= begin + self.count)",
        "(index < begin) | (index >= begin + self.count - 1)",
        "a padded row reads its last sink twice",
        "packages/kvloom/tests/laws/test_padding.py",
    ),
    _defect(
        "cache", "cache/sinks.py",
        'tensors = ("keys", "values", "start")',
        'tensors = ("keys", "values")',
        "after a beam search, a row's sinks begin where those of another row did",
        "packages/kvloom/tests/laws/test_sequence.py",
    ),
    _defect(
        "cache", "cache/latents.py",
        "return torch.cat(parts, dim=-1) * scale",
        "return torch.cat(parts, dim=-1)",
        "where recall chooses latents, their positional logits are not scaled",
        "packages/kvloom/tests/unit/cache/test_latents.py",
    ),
    _defect(
        "cache", "cache/latents.py",
        "cuts = [0, *range(UNPACK, n - own, UNPACK), n]",
        "cuts = [0, *range(UNPACK, n, UNPACK), n]",
        "some tokens of a long chunk over latents are cut from those that they see causally",
        "packages/kvloom/tests/unit/cache/test_latents.py",
    ),
    _defect(
        "cache", "cache/step.py",
        "None if self.attended is None or begin else",
        "None if self.attended is None else",
        "the first draft over latents attends as the prompt's first tokens did",
        "packages/kvloom/tests/models/test_latents.py",
    ),
    _defect(
        "cache", "store/kv_side.py",
        "nonpadding[:, :, begin:end]",
        "nonpadding[:, :, : end - begin]",
        "where a later step packs, padding of the first tokens is left out, not its own",
        "packages/kvloom/tests/laws/test_padding.py",
    ),
    _defect(
        "cache", "cache/verification.py",
        "min(step.tokens, max(0, self.certain - state.seen))",
        "min(step.tokens, self.certain)",
        "later drafts attend at once, and not as without speculation",
        "packages/kvloom/tests/laws/test_crop.py",
    ),
    _defect(
        "cache", "cache/commit.py",
        "_store(state, segment, queries, new, prompt)",
        "_store(state, segment, queries, new, prompt=False)",
        "a context that waited for the recipe's start is packed as decode steps are",
        "packages/kvloom/tests/extend/test_extend_runtime.py", "-k", "start",
    ),
    _defect(
        "cache", "cache/outliers.py",
        "        slots = slots + lo\n",
        "",
        "behind sinks, the exact copies are of tokens before the outliers",
        "packages/kvloom/tests/laws/test_outliers.py",
    ),
    _defect(
        "cache", "cache/ragged.py",
        "            self.logical_index = self.logical_index.view(-1, self.unit)[blocks].flatten()\n",
        "            self.logical_index = self.logical_index.view(-1, self.unit).flatten()\n",
        "rows that moved have the padding of other rows",
        "packages/kvloom/tests/laws/test_ragged.py",
    ),
    _defect(
        "cache", "cache/evictor.py",
        "max(0, tokens - max(0, self.budget - sinks))",
        "max(0, tokens - self.budget)",
        "sinks are held beside the budget, not within it",
        "packages/kvloom/tests/laws/test_budgets.py",
    ),
    # --- kernels -----------------------------------------------------------------------------
    _defect(
        "kernels", "kernels/attend/reference.py",
        "logits.masked_fill_(later.triu_(n - t + lo + 1), -torch.inf)",
        "logits.masked_fill_(later.triu_(n - t + 1), -torch.inf)",
        "causality ignores where a block of query rows begins",
        "packages/kvloom/tests/kernels/test_attend.py",
    ),
    _defect(
        "kernels", "kernels/attend/reference.py",
        "(behind > 0) & (behind <= ahead", "(behind >= 0) & (behind <= ahead",
        "a token of an image attends to itself twice",
        "packages/kvloom/tests/laws/test_ahead.py",
    ),
    _defect(
        "kernels", "kernels/score/reference.py",
        "(behind > ahead[:, lo : lo + rows, None])", "(behind > 0 * ahead[:, lo : lo + rows, None])",
        "a score counts the tokens of an image causally",
        "packages/kvloom/tests/models/test_image_masks.py",
    ),
    _defect(
        "cache", "cache/scoring.py",
        "torch.where(old >= self.fixed_from", "torch.where(old == torch.inf",
        "tokens that stay by their ids are evicted at later steps",
        "packages/kvloom/tests/models/test_protected_ids.py",
    ),
    _defect(
        "kernels", "kernels/score/reference.py",
        "pairs.tril(end - rows - window)",
        "pairs.tril(end - rows - window - 1)",
        "a query sees one token more than its window",
        "packages/kvloom/tests/kernels/test_column_mass.py",
    ),
    _defect(
        "kernels", "kernels/quantize/reference.py",
        "    codes = encode(grouped, scale, zero, bits)\n",
        "    codes = encode(grouped, (high - low) / top(bits), low, bits)\n",
        "codes are computed with the scale in fp32, not with the scale that is stored",
        "packages/kvloom/tests/kernels/test_quant.py",
    ),
    _defect(
        "kernels", "kernels/quantize/reference.py",
        "high = grouped.masked_fill(pad, -torch.inf)",
        "high = grouped.masked_fill(pad, 0.0)",
        "padding widens the range of a group of negative numbers",
        "packages/kvloom/tests/kernels/test_quant.py",
    ),
    _defect(
        "kernels", "kernels/select/reference.py",
        "rank = torch.searchsorted(end, place, right=True)",
        "rank = torch.searchsorted(end, place, right=False)",
        "the first token of a cluster is taken from the end of the cluster before",
        "packages/kvloom/tests/kernels/test_select.py",
    ),
    _defect(
        "kernels", "kernels/attend/cpu/softmax.py",
        "bound = min(nt, max(0, ahead - t + m % t + 1))",
        "bound = min(nt, max(0, ahead - t + m // t + 1))",
        "the compiled kernel takes a row's head for its query, so drafts see later tokens",
        "packages/kvloom/tests/kernels/test_cpu_attend.py", "-k", "up_to_8_queries",
    ),
    _defect(
        "kernels", "kernels/attend/cpu/softmax.py",
        "weights += load_one(row_state + part * size + 64, 0) * first_lane(weight)",
        "weights += load_one(row_state + part * size + 64, 0)",
        "parts of several threads are merged without their weights",
        "packages/kvloom/tests/kernels/test_cpu_attend.py", "-k", "threads",
    ),
    _defect(
        "keep", "keep/rotated.py",
        "repeated = step.rope.rotate(repeated, -count)",
        "repeated = step.rope.rotate(repeated, count)",
        "queries are rotated to positions before the prompt",
        "packages/kvloom/tests/models/test_expected.py", "-k", "rotated",
    ),
    _defect(
        "kernels", "kernels/score/cpu/mass_kernel.py",
        "maximum(load(row) * f, a0)",
        "maximum(load(row), a0)",
        "the largest weight of a key is not normalized",
        "packages/kvloom/tests/kernels/test_column_mass.py", "-k", "largest",
    ),
    _defect(
        "kernels", "kernels/score/cpu/mass.py",
        "see = None if see is None else F.pad(see, padding, value=True)",
        "see = None if see is None else F.pad(see, padding, value=False)",
        "of fewer than 16 tokens, the compiled kernel evicts one that does not exist",
        "packages/kvloom/tests/kernels/test_cpu_score.py", "-k", "lowest",
    ),
    # --- hf ----------------------------------------------------------------------------------
    _defect(
        "hf", "hf/models/gptj.py",
        "(torch.arange(0, dims, 2).float() / dims), interleaved=True)",
        "(torch.arange(0, dims, 2).float() / dims), interleaved=False)",
        "GPT-J's keys are rotated in pairs of the wrong channels",
        "packages/kvloom/tests/models/test_rotary.py",
    ),
    _defect(
        "hf", "hf/routed.py",
        "return -tokens if tokens <= 0 else max(0, seen - tokens)",
        "return -tokens if tokens <= 0 else tokens",
        "the older form of crop removes as many tokens as it should leave",
        "packages/kvloom/tests/models/test_generate.py", "-k", "crop",
    ),
    _defect(
        "hf", "hf/forward.py",
        "evicted = dropped - torch.as_tensor(padding, device=positions.device)",
        "evicted = torch.as_tensor(dropped, device=positions.device)",
        "renumbered positions count the padding of a row as tokens that were dropped",
        "packages/kvloom/tests/models/test_positions.py", "-k", "padded or padding",
    ),
    _defect(
        "hf", "hf/attention.py",
        "if attention_mask is not None and not attention_mask.all():",
        "if attention_mask is not None and not attention_mask[:, -1].all():",
        "a left-padded batch attends to its padding",
        "packages/kvloom/tests/models/test_generate.py", "-k", "padded or padding",
    ),
    _defect(
        "hf", "hf/routing.py",
        "layer.cache.recording = bool(records)",
        "layer.cache.recording = layer.cache.recording or bool(records)",
        "after assisted decoding, a cache never packs or drops again",
        "packages/kvloom/tests/models/test_generate.py", "-k", "assisted",
    ),
    _defect(
        "hf", "hf/models/falcon.py",
        "k, v = k[:, ::r], v[:, ::r]",
        "k, v = k[:, ::r], v[:, : module.num_kv_heads]",
        "Falcon's values are taken from the wrong heads",
        "packages/kvloom/tests/models/test_architectures.py", "-k", "falcon",
    ),
    _defect(
        "hf", "hf/models/bloom.py",
        "position = positions(adapters.visible_mask(attention_mask), q.shape[0], tokens, q.device)",
        "position = positions(None, q.shape[0], tokens, q.device)",
        "BLOOM's ALiBi counts padding as distance",
        "packages/kvloom/tests/models/test_adapters.py", "packages/kvloom/tests/models/test_architectures.py", "-k", "bloom",
    ),
    _defect(
        "hf", "hf/save.py",
        '"rank": rank, "dtype": dtype, **more}',
        '"rank": rank, **more}',
        "a cache is loaded into a model of another dtype",
        "packages/kvloom/tests/models/test_saved_refused.py",
    ),
    _defect(
        "hf", "hf/attention.py",
        "check_arguments(layer, arguments)",
        "check_arguments(layer, dict.fromkeys(arguments))",
        "attention sinks and other arguments are dropped",
        "packages/kvloom/tests/models/test_refused_steps.py", "packages/kvloom/tests/models/test_self_check.py",
    ),
    _defect(
        "hf", "hf/attention.py",
        "return mask if make is None else make()",
        "return mask if make is None or not mask.numel() else make()",
        "layers of transformers get kvloom's empty mask where nothing is padded",
        "packages/kvloom/tests/sweep/test_sweep.py", "-k", "stay_with",
    ),
    _defect(
        "hf", "hf/attention.py",
        "if steps > 1:",
        "if steps > 2:",
        "the first of two threads to end its step takes kvloom's attention from the other",
        "packages/kvloom/tests/models/test_interrupted.py", "packages/kvloom/tests/models/test_refused_steps.py",
    ),
    _defect(
        "hf", "hf/self_check.py",
        "mask[1, :_PADDING] = 0",
        "mask[1, :_PADDING] = 1",
        "the check of a model has no padded row",
        "packages/kvloom/tests/models/test_self_check.py",
    ),
    _defect(
        "hf", "hf/self_check.py",
        "equal &= plain_logits.argmax(dim=-1) == other_logits.argmax(dim=-1)",
        "same &= plain_logits.argmax(dim=-1) != other_logits.argmax(dim=-1)",
        "the check of a model compares the first step alone",
        "packages/kvloom/tests/models/test_self_check.py",
    ),
]  # fmt: skip
