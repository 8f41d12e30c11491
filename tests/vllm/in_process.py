"""vLLM inside one process, without a server: it starts in a fifth of the time. Run in vLLM's environment, with requests
as JSON lines on standard input and answers on standard output; imported, it starts itself there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SETTINGS = {
    "dtype": "float32", "enforce_eager": True, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 24,
    "logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True, "load_format": "dummy",
}  # fmt: skip


class InProcess:
    """An engine in a process of its own. It serves one model after another."""

    def __init__(self, python: Path, log: Path, ranks: int = 1) -> None:
        self._log = log
        cores = "|".join(map(str, range(ranks))) if ranks > 1 else "nobind"
        own = {
            "PYTHONPATH": str(REPOSITORY), "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": cores,
            "MEGAGRPO_VLLM_DEVICE": "cpu", "VLLM_HOST_IP": "127.0.0.1",
        }  # fmt: skip
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [str(python), "-m", "tests.vllm.in_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **own},
                cwd=REPOSITORY,
                text=True,
            )

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"path": path, **body}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer or "error" in (found := json.loads(answer)):
            raise AssertionError(f"{answer}\n{self._log.read_text()[-4000:]}")
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class Model:
    """The model that is served, inside vLLM's process."""

    def __init__(self) -> None:
        self.llm: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        match request["path"]:
            case "/start":
                return self.start(request["arguments"])
            case "/collective_rpc":
                return {"results": self.llm.collective_rpc(request["method"], kwargs=request["kwargs"])}
            case "/generate":
                return self.generate(request["prompts"], request["tokens"])
            case _:
                raise ValueError(request["path"])

    def start(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        import gc

        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()
            cleanup_dist_env_and_memory()
        self.llm = LLM(**arguments)
        return {}

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        settings = [
            SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False, seed=seed)
            for seed in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": its} for its in prompts], settings, use_tqdm=False)
        samples = [output.outputs[0] for output in outputs]
        return {
            "tokens": [list(its.token_ids) for its in samples],
            "logprobs": [[next(iter(one.values())).logprob for one in its.logprobs] for its in samples],
        }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints
    model = Model()
    for line in sys.stdin:
        try:
            answer = model.answer(json.loads(line))
        except Exception as error:  # noqa: BLE001  (the test shows it)
            import traceback

            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    from megagrpo.rollout.vllm.launch import prepare_server_process

    prepare_server_process(spawned=False)
    main()
