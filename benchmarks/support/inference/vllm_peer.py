"""vLLM as a child of `benchmarks.inference`: runs in `.venv-vllm`, so it imports nothing of Forge.

    python benchmarks/support/inference/vllm_peer.py --model DIRECTORY --dtype TYPE --context TOKENS

Reads one JSON request a line, {"prompts": [[id]], "tokens": n}, and answers each with one line,
{"answers": [[id]], "cpu_s": seconds}. A log-prob of each sampled token is computed, as a rollout
needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

# One thread and one process, so that its CPU time is all that vLLM takes.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--context", type=int, required=True)
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from vllm import LLM, SamplingParams

    model: Any = LLM(
        model=options.model,
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=options.context,
        max_num_seqs=128,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        seed=0,
    )
    torch.set_num_threads(1)
    replies.write(json.dumps({"ready": True}) + "\n")
    replies.flush()
    for line in sys.stdin:
        request = json.loads(line)
        sampling = SamplingParams(
            temperature=1.0,
            max_tokens=request["tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
        )
        prompts = [{"prompt_token_ids": ids} for ids in request["prompts"]]
        began_s = time.process_time()
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        cpu_s = time.process_time() - began_s
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        replies.write(json.dumps({"answers": answers, "cpu_s": cpu_s}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
