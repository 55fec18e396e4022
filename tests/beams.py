"""Whether the rows of a cache move with the beams of `generate`."""

from __future__ import annotations

import torch

import kvloom


def assert_rows_follow_beams(model, recipe: str, inputs: dict, beams: int = 3, new: int = 12):
    """The score of each beam is that of its tokens, read by a cache whose rows never move."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    found = model.generate(
        **inputs, past_key_values=kvloom.Cache(model, recipe), max_new_tokens=new,
        num_beams=beams, do_sample=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    tokens, prompt = found.sequences, ids.shape[1]
    assert torch.equal(tokens[:, :prompt], ids)
    assert tokens.shape[1] == prompt + new
    assert (found.beam_indices.diff(dim=1) != 0).any()  # rows have moved
    cache, own = kvloom.Cache(model, recipe), 0.0
    for begin, end in ((0, prompt), *((n, n + 1) for n in range(prompt, prompt + new - 1))):
        seen = torch.cat([mask, torch.ones_like(tokens[:, prompt:end])], dim=1)
        places = (seen.cumsum(dim=1) - 1).clamp(min=0)[:, begin:end]  # as `generate` counts them
        step_inputs = {"attention_mask": seen, "position_ids": places, "past_key_values": cache}
        with torch.inference_mode():
            step = model(tokens[:, begin:end], **step_inputs)
        own += step.logits[:, -1].log_softmax(-1).gather(1, tokens[:, end : end + 1])[:, 0]
    torch.testing.assert_close(own / new, found.sequences_scores, rtol=1e-4, atol=1e-4)
