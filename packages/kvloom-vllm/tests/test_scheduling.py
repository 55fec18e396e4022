"""What the scheduler does to requests: preemption, aborts, several answers, two processes."""

import engines

BLOCK = 131_072  # bytes of a block of the reference model at 4 bit, with exact tails in fp32


def core(llm):
    """Return the engine's scheduler, which lives in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(llm):
    return core(llm).kv_cache_manager.block_pool.get_num_free_blocks()


def test_preempted_requests_go_on_exactly():
    """A resumed request computes its prompt and its tokens so far again, as one exact prompt."""
    prompts, new = engines.prompts([200 + i for i in range(8)]), 120

    def job(llm):
        scheduler, cuts, before = core(llm), {}, free_blocks(llm)
        preempt = scheduler._preempt_request

        def noting(request, *args, **options):
            cuts[request.request_id.split("-")[0]] = request.num_output_tokens
            return preempt(request, *args, **options)

        scheduler._preempt_request = noting
        found = engines.generate(llm, prompts, new)
        return found, {int(name): at for name, at in cuts.items()}, before == free_blocks(llm)

    found, cuts, all_freed = engines.run(job, "kivi-4", kv_cache_memory_bytes=42 * BLOCK)
    assert [len(one) for one in found] == [new] * len(prompts)
    assert cuts, "the pool is too large: nothing was preempted"
    assert all_freed
    for number, at in cuts.items():
        prompt = prompts[number] + found[number][:at]
        assert [found[number][at:]] == engines.in_transformers("kivi-4", [prompt], new - at)


def test_aborted_requests_leave_no_block_and_no_trace():
    prompts, new = engines.prompts([300, 310, 320, 330, 340, 350]), 40

    def job(llm):
        from vllm import SamplingParams

        before, one = free_blocks(llm), llm.llm_engine
        wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            one.add_request(str(i), {"prompt_token_ids": prompt}, wanted)
        found, steps = {}, 0
        while one.has_unfinished_requests():
            for out in one.step():
                if out.finished:
                    found[int(out.request_id)] = list(out.outputs[0].token_ids)
            steps += 1
            if steps == 10:
                one.abort_request(["1", "4"])
                for i in (1, 4):  # others take their place
                    one.add_request(str(10 + i), {"prompt_token_ids": prompts[i]}, wanted)
        return found, before == free_blocks(llm)

    found, all_freed = engines.run(job, "kivi-4")
    assert all_freed
    whole = {int(i): tokens for i, tokens in found.items() if len(tokens) == new}
    assert sorted(whole) == [0, 2, 3, 5, 11, 14]
    expected = engines.in_transformers("kivi-4", prompts, new)
    assert whole == {i: expected[i % 10] for i in whole}


def test_several_answers_of_one_prompt():
    prompt = engines.prompts([300])[0]

    def job(llm):
        from vllm import SamplingParams

        wanted = SamplingParams(n=3, max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)[0]
        alone = [
            llm.generate(
                [{"prompt_token_ids": prompt}],
                SamplingParams(max_tokens=40, temperature=1.0, seed=1 + i, ignore_eos=True),
                use_tqdm=False,
            )[0]
            for i in range(3)
        ]
        return [[list(x.token_ids) for x in one.outputs] for one in (found, *alone)]

    together, *alone = engines.run(job, "near-lossless")
    assert len({tuple(one) for one in together}) == 3
    assert together == [one[0] for one in alone]


def test_two_processes_of_tensor_parallelism_give_the_same_tokens():
    prompts = engines.prompts([5, 127, 128, 300, 517])

    def job(llm):
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        return engines.generate(llm, prompts, 24), blocks

    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    both, two = engines.run(job, "near-lossless", **options)
    alone, one = engines.run(job, "near-lossless")
    assert both == alone
    assert two in (2 * one, 2 * one + 1)  # each process holds one of the two key/value heads
