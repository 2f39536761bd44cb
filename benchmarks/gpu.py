"""What a GPU is asked: decode against its bandwidth, training against its peak, updates, both ends on it. See `gpu.sh`.

    python -m benchmarks.gpu STEP --out FOLDER [--size 1.5b] [--device cuda:0]

Models have random weights of a configuration's sizes, in bfloat16 (`tiny`: float32, to try the scripts on a CPU). The limits
are measured on the same device: bandwidth by copying, peak by a large product of matrices. Every step writes
FOLDER/STEP.json; `table` collects them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks import common, shared_prompts
from benchmarks.common import Record
from benchmarks.trainer import make_samples
from pipelinerl.config.schema import TrainerConfig
from pipelinerl.engine import LocalEngine, static
from pipelinerl.engine.static import engine_for
from pipelinerl.files import shared_memory
from pipelinerl.hub.hub import DirectMessages
from pipelinerl.models.folder import find_model
from pipelinerl.models.state import named_weights
from pipelinerl.models.varlen import attention_of
from pipelinerl.trainer.step import Learner
from pipelinerl.types import GenerationRequest, SamplingParams
from pipelinerl.weights.receiving import SharedWeightReceiver
from pipelinerl.weights.sending import SharedWeightSender

SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
    },
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "7b": {
        "hidden_size": 3584,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
"""Those of Qwen2.5, and one for trying."""
END_EVERY = 200
"""One of so many tokens ends a completion: lengths of random text are then geometric, with this mean."""
ROUND = 4
"""Optimizer steps of a round, and the pipeline's largest lag, in the two runs."""
GOALS = {"bandwidth": 0.60, "mfu": 0.45}


def config_of(size: str) -> Qwen2Config:
    sizes = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True} | SIZES[size]
    ends = list(range(1, sizes["vocab_size"], END_EVERY))
    return Qwen2Config(eos_token_id=ends, bos_token_id=0, **sizes)


def dtype_of(options: argparse.Namespace) -> torch.dtype:
    return torch.float32 if options.size == "tiny" else torch.bfloat16


def make_model(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config_of(options.size), dtype=dtype_of(options)).eval()


def seconds(options: argparse.Namespace, work: Callable[[], object], repetitions: int) -> float:
    """Time of one call: the mean of `repetitions`, after one that does not count."""
    work()
    _wait(options)
    begin_s = time.perf_counter()
    for _ in range(repetitions):
        work()
    _wait(options)
    return (time.perf_counter() - begin_s) / repetitions


def _wait(options: argparse.Namespace) -> None:
    if options.device != "cpu":
        torch.cuda.synchronize()


# ---- steps


def limits(options: argparse.Namespace) -> list[Record]:
    """Bytes/s that are read and written, FLOP/s of a product in the model's type, and bytes/s from pinned memory.

    Also the time of one layer's attention over slots, with the window that ends at the query and without one.
    """
    tiny = options.size == "tiny"
    source = torch.ones((1 << 24) if tiny else (1 << 31), dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    side = 512 if tiny else 8192
    a, b = torch.randn(2, side, side, device=options.device, dtype=dtype_of(options))
    record: Record = {
        "torch": torch.__version__,
        "device": options.device if tiny else torch.cuda.get_device_name(),
        "bytes_per_s": 2 * source.numel() / seconds(options, lambda: target.copy_(source), 10),
        "flop_per_s": 2 * side**3 / seconds(options, lambda: a @ b, 10),
    }
    if options.device != "cpu":
        host = torch.ones(1 << 30, dtype=torch.uint8).pin_memory()
        copied = target[: len(host)]
        record["host_bytes_per_s"] = len(host) / seconds(options, lambda: copied.copy_(host, non_blocking=True), 4)
    for slots in options.slots:
        for context in options.contexts:
            for window in ((-1, 0), (-1, -1)):
                called = attention_call(options, slots, context, window)
                record[f"attention_s {slots} {context} {window}"] = seconds(options, called, 20)
    return [record]


def attention_call(options: argparse.Namespace, slots: int, context: int, window: tuple[int, int]) -> Callable[[], Tensor]:
    """One query for each of `slots` sequences of `context` keys, in a cache of places for them."""
    sizes = config_of(options.size)
    heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
    new = {"device": options.device, "dtype": dtype_of(options)}
    query = torch.randn(slots, heads, sizes.hidden_size // heads, **new)
    key, value = torch.randn(2, slots * context, kv_heads, query.shape[-1], **new)
    begins = torch.arange(slots + 1, dtype=torch.int32, device=options.device)
    used = torch.full((slots,), context, dtype=torch.int32, device=options.device)
    return lambda: attention_of(query)(
        query, key, value, begins, begins * context, 1, context, scale=0.1, window_size=window, seqused_k=used
    )


def decode(options: argparse.Namespace) -> list[Record]:
    """Steps with all slots decoding, at each number of slots and context, in each of `options.ways`."""
    records: list[Record] = []
    tokens = 8 if options.size == "tiny" else 40
    for way in options.ways:
        record: Record = {"size": options.size, "decoding": way}
        try:
            engine = new_engine(options, max(options.contexts) + 4 * tokens, way)
            for slots in sorted(options.slots, reverse=True):
                for context in options.contexts:
                    records.append(record | _decode(options, engine, slots, context, tokens))
                    save(options, records)
        except Exception as error:  # noqa: BLE001 - the other way is to be measured
            records.append(record | {"error": f"{type(error).__name__}: {error}".partition("\n")[0]})
            traceback.print_exc()
    return records


def _decode(options: argparse.Namespace, engine: LocalEngine, slots: int, context: int, tokens: int) -> Record:
    names = fill(engine, slots, context, 3 * tokens)
    before = engine.progress().tokens_generated
    step_s = seconds(options, engine.step, tokens)
    sampled = (engine.progress().tokens_generated - before) / (tokens + 1)
    for name in names:
        engine.cancel(name)
    engine.step()
    weights = {tensor.data_ptr(): tensor for tensor in named_weights(engine._runner.model).values()}
    sizes = config_of(options.size)
    kv_numbers = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.hidden_size // sizes.num_attention_heads
    read = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if not sizes.tie_word_embeddings:  # a step looks up few of its rows
        read -= sizes.vocab_size * sizes.hidden_size * dtype_of(options).itemsize
    read += slots * (context + tokens // 2) * kv_numbers * dtype_of(options).itemsize
    return {
        "slots": slots,
        "context": context,
        "step_ms": 1e3 * step_s,
        "tokens_per_s": sampled / step_s,
        "bytes_per_s": read / step_s,
        "runner": engine.progress().runner,
    }


def new_engine(options: argparse.Namespace, room: int, way: Any = "auto") -> LocalEngine:
    return engine_for(make_model(options), decoding=way, slots=max(options.slots), max_length=room + 8, prefill_tokens=8192)


def fill(engine: LocalEngine, slots: int, context: int, tokens: int) -> list[str]:
    """Make `slots` sequences decode from `context` tokens on. Each may sample `tokens` more. Returns their ids."""
    generator = torch.Generator().manual_seed(0)
    names = [f"{engine.progress().decode_steps}/{i}" for i in range(slots)]
    for name in names:
        prompt = torch.randint(engine._runner.vocabulary, (context,), generator=generator).tolist()
        engine.submit(GenerationRequest(id=name, prompt_ids=tuple(prompt), sampling=SamplingParams(max_tokens=tokens)))
    while engine.queued or engine._prefills:
        engine.step()
    engine.step()
    return names


def refill(options: argparse.Namespace) -> list[Record]:
    """Tokens/s while each sequence that ends is replaced, as in a run: with prompts as they come (hold 0), and held."""
    records: list[Record] = []
    slots, prompt = max(options.slots), 8 if options.size == "tiny" else 64
    lengths = (16,) if options.size == "tiny" else (128, 512)
    engine = new_engine(options, prompt + 2 * max(lengths))
    generator, numbers = torch.Generator().manual_seed(0), itertools.count()
    for most, hold in itertools.product(lengths, (0, 16, 0, 16)):
        static._HELD_STEPS = hold

        def submit(most: int = most) -> None:
            ids, tokens = torch.randint(engine._runner.vocabulary, (prompt,), generator=generator).tolist(), 2 * most
            length = int(torch.randint(1, tokens, (), generator=generator))  # the mean is `most`
            engine.submit(
                GenerationRequest(id=str(next(numbers)), prompt_ids=tuple(ids), sampling=SamplingParams(max_tokens=length))
            )

        for _ in range(slots):
            submit()
        begin_s, before = 0.0, engine.progress()
        while not begin_s or time.perf_counter() - begin_s < options.seconds:
            for _ in engine.step().finished:
                submit()
            if not begin_s and engine.progress().decode_steps - before.decode_steps > most:
                _wait(options)
                begin_s, before = time.perf_counter(), engine.progress()
        after, took_s = engine.progress(), time.perf_counter() - begin_s
        tokens = after.tokens_generated - before.tokens_generated
        steps = after.decode_steps - before.decode_steps
        records.append(
            {"slots": slots, "length": most, "hold": hold, "step_ms": 1e3 * took_s / steps, "tokens_per_s": tokens / took_s}
        )
        save(options, records)
        engine.restart()
    return records


def train(options: argparse.Namespace) -> list[Record]:
    """Optimizer steps on packed rollouts, without and with compiled layers.

    The share of the peak counts 6 FLOP a parameter and token, and attention.
    """
    records: list[Record] = []
    for compiled in (False, True):
        records.append({"size": options.size, "compile": compiled, **_train(options, compiled=compiled)})
        save(options, records)
    return records


def _train(options: argparse.Namespace, *, compiled: bool) -> Record:
    model = make_model(options).train(False)
    config = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens, compile=compiled)
    count, longest = (8, 40) if options.size == "tiny" else (64, 1000)
    samples = make_samples(count, longest, 64 if longest > 64 else 6, model.config.vocab_size)
    learner = Learner(model, config, temperature=1.0)
    step_s = seconds(options, lambda: learner.step(samples, version=0), 1 if options.size == "tiny" else 4)
    tokens = sum(sample.length for sample in samples)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sizes = model.config
    attention = 6 * sizes.num_hidden_layers * sizes.hidden_size * sum(sample.length**2 for sample in samples)
    flop = 6 * parameters * tokens + attention
    return {"runner": learner.runner, "step_s": step_s, "tokens_per_s": tokens / step_s, "flop_per_s": flop / step_s}


def shared(options: argparse.Namespace) -> list[Record]:
    """Optimizer steps on groups of 16: prompts that go through the model once, compared with once for each attempt.

    A workload is `PROMPT:ANSWER` tokens. The last one has a very long prompt and hundreds of short answers: attention copies
    the prompt's keys and values for each of them, one layer at a time.
    """
    records: list[Record] = []
    tiny = options.size == "tiny"
    for workload in ("40:4", "20:20") if tiny else ("1000:100", "500:500", "100:900", "4000:8"):
        many = workload.endswith(":8")
        model = make_model(options).train(False)
        sizes = (512, 512) if many else (32, 16)
        samples = shared_prompts.make_samples(workload, *sizes, model.config.vocab_size)
        for least in (None,) if many else (None, 1.0):
            config = TrainerConfig(micro_batch_tokens=options.micro_batch_tokens, learning_rate=1e-12)
            measure = shared_prompts.system(model, config, samples, least)
            if options.device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            _, *found = [measure() for _ in range(2 if tiny or many else 4)]  # a step ends with its numbers on the host
            step_s = sum(one["wall_s"] for one in found) / len(found)
            memory = 0 if options.device == "cpu" else torch.cuda.max_memory_allocated()
            record = {"workload": workload, "shared": least is None, **found[-1]}
            records.append(record | {"step_s": step_s, "peak_bytes": memory})
            save(options, records)
        del model, measure
        if options.device != "cpu":
            torch.cuda.empty_cache()
    return records


def update(options: argparse.Namespace) -> list[Record]:
    """An update through shared memory, in one process: sending, verifying, the engine's pause with all slots in use.

    The pause is measured twice: with the checksum that the device computes, and with that of the host (`host_pause_s`).
    """
    trained = named_weights(make_model(options))
    sender_fd, hub = shared_memory(), DirectMessages()
    sender, receiver = SharedWeightSender(sender_fd, hub, 1), SharedWeightReceiver(sender_fd, hub, options.device)
    engine = new_engine(options, options.contexts[0] + 64)
    fill(engine, max(options.slots), options.contexts[0], 64)
    records = []
    for version in range(1, 5):
        engine.step()
        begin_s = time.perf_counter()
        sender.send(version, trained)
        sent_s = time.perf_counter()
        offered = receiver.poll()
        polled_s = time.perf_counter()
        assert offered is not None
        receipt = engine.update_weights(offered)
        host_pause_s = engine.update_weights(offered._replace(device_checksum="")).pause_s
        receiver.acknowledge(receipt)
        times_s = {"send_s": sent_s - begin_s, "poll_s": polled_s - sent_s, "pause_s": receipt.pause_s}
        records.append({"version": version, **times_s, "host_pause_s": host_pause_s})
    receiver.close()
    sender.close()
    os.close(sender_fd)
    return records[1:]


def loop(options: argparse.Namespace) -> list[Record]:
    """One end: `decode` or `train`. For each line of input, works for `options.seconds` and prints its tokens/s."""
    if options.end == "decode":
        tokens, context = (64 if options.size == "tiny" else 400), options.contexts[0]
        engine = new_engine(options, context + tokens)

        def work() -> None:
            if not engine.in_progress:
                fill(engine, max(options.slots), context, tokens)
            engine.step()

        def done() -> int:
            return engine.progress().tokens_generated

    else:
        model = make_model(options)
        learner = Learner(model, TrainerConfig(micro_batch_tokens=options.micro_batch_tokens), temperature=1.0)
        longest = 40 if options.size == "tiny" else 500
        samples = make_samples(16, longest, 6, model.config.vocab_size)
        trained = 0

        def work() -> None:
            nonlocal trained
            learner.step(samples, version=0)
            trained += sum(sample.length for sample in samples)

        def done() -> int:
            return trained

    work()
    _wait(options)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, begin_s = done(), time.perf_counter()
        while time.perf_counter() - begin_s < options.seconds:
            work()
        _wait(options)
        print((done() - begin) / (time.perf_counter() - begin_s), flush=True)
    return []


def both(options: argparse.Namespace) -> list[Record]:
    """Generation and training in two processes on one GPU: each alone, then both at once."""
    ends = {end: _start_loop(options, end) for end in ("decode", "train")}
    try:
        for end, process in ends.items():
            while (line := _line(process)) != "ready\n":
                if not line:
                    raise SystemExit(f"the process of {end} ended; its error is above")
        alone = {end: _rates({end: process})[end] for end, process in ends.items()}
        together = _rates(ends)
    finally:
        for process in ends.values():
            process.kill()
            process.communicate()
    return [
        {"end": end, "mps": options.mps, "alone": alone[end], "together": together[end], "kept": together[end] / alone[end]}
        for end in ends
    ]


def _start_loop(options: argparse.Namespace, end: str) -> subprocess.Popen[str]:
    sizes = ["--size", options.size, "--device", options.device, "--slots", str(options.slots[-1])]
    rest = ["--contexts", str(options.contexts[0]), "--seconds", str(options.seconds), "--out", str(options.out)]
    more = ["--micro-batch-tokens", str(options.micro_batch_tokens)]
    command = [sys.executable, "-m", "benchmarks.gpu", "loop", "--end", end, *sizes, *rest, *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _rates(processes: dict[str, subprocess.Popen[str]]) -> dict[str, float]:
    """Tokens/s of each end, while these work at once."""
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return {end: float(_line(process)) for end, process in processes.items()}


def folder(options: argparse.Namespace) -> list[Record]:
    """Write the model of random weights, with the demo's tokenizer, to OUT/model, for runs and vLLM."""
    target = options.out / "model"
    model = make_model(options)
    model.save_pretrained(target)
    for file in Path(find_model("demo")).glob("tokenizer*"):
        shutil.copy(file, target)
    return [{"size": options.size, "parameters": sum(parameter.numel() for parameter in model.parameters())}]


def vllm(options: argparse.Namespace) -> list[Record]:
    """vLLM's tokens/s over the same model, slots and contexts, if it is installed."""
    try:
        from vllm import LLM  # noqa: PLC0415 - optional
        from vllm import SamplingParams as Sampling  # noqa: PLC0415 - as above
    except ImportError:
        print("vLLM is not installed here")
        return []
    served = LLM(model=str(options.out / "model"), skip_tokenizer_init=True, gpu_memory_utilization=0.8, max_model_len=4096)
    records: list[Record] = []
    tokens = 128
    for slots in options.slots:
        for context in options.contexts:
            ids = torch.randint(3, 500, (slots, context), generator=torch.Generator().manual_seed(0)).tolist()
            prompts: Any = [{"prompt_token_ids": line} for line in ids]
            times_s = {}
            for count in (1, tokens + 1):  # the difference is without prefill
                sampling = Sampling(max_tokens=count, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
                served.generate(prompts, sampling, use_tqdm=False)
                begin_s = time.perf_counter()
                served.generate(prompts, sampling, use_tqdm=False)
                times_s[count] = time.perf_counter() - begin_s
            step_s = (times_s[tokens + 1] - times_s[1]) / tokens
            records.append({"slots": slots, "context": context, "step_ms": 1e3 * step_s, "tokens_per_s": slots / step_s})
    return records


def runs(options: argparse.Namespace) -> list[Record]:
    """`pipeline` and `conventional` on the same model and task: when each of a few optimizer steps was taken."""
    records = []
    steps = 3 * ROUND
    for kind in options.schedules:
        run_dir = options.out / f"run-{kind}"
        shutil.rmtree(run_dir, ignore_errors=True)
        flags = {
            "run_dir": run_dir,
            "model.path": options.out / "model",
            "model.dtype": "float32" if options.size == "tiny" else "bfloat16",
            "schedule.kind": kind,
            "schedule.steps_per_round" if kind == "conventional" else "schedule.max_lag": ROUND,
            "engine.device": options.device,
            "trainer.device": options.device,
            "engine.slots": options.slots[-1],
            "engine.max_length": 128 if options.size == "tiny" else 1024,
            "actor.max_tokens": 64 if options.size == "tiny" else 900,
            "actor.group_size": 8,
            "trainer.batch_size": 16 if options.size == "tiny" else 256,
            "trainer.steps": steps,
            "trainer.learning_rate": "1e-6",
            "trainer.micro_batch_tokens": options.micro_batch_tokens,
            "preprocess.zero_advantage": "keep",
            "evaluation.problems": 0,
            "metrics.view": "plain",
        }
        arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        main_of_cli = "import sys; from pipelinerl.cli import main; sys.exit(main())"
        begin_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", main_of_cli, "train", *arguments], check=True)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        records.append(
            {
                "schedule": kind,
                "mps": options.mps,
                "wall_s": time.perf_counter() - begin_s,
                "times_s": [line["time_s"] for line in lines],
            }
        )
        save(options, records)
    return records


# ---- results


STEPS: dict[str, Callable[[argparse.Namespace], list[Record]]] = {
    step.__name__: step for step in (limits, decode, refill, train, shared, update, both, folder, vllm, runs, loop)
}


def save(options: argparse.Namespace, records: Sequence[Record]) -> None:
    name = f"{options.step}-mps" if options.mps else options.step
    settings = common.settings_of(options)
    shown = [{key: value for key, value in record.items() if key != "times_s"} for record in records]
    common.write_results(
        name, settings=settings, machine_before=common.machine(), records=records, table=shown, directory=options.out
    )


def read(out: Path, name: str) -> list[Record]:
    path = out / f"{name}.json"
    records: list[Record] = json.loads(path.read_text())["repetitions"] if path.exists() else []
    return records


def table(out: Path) -> list[Record]:
    """One line for each question: what was measured, its share of the limit, and the goal."""
    limit: Record = (read(out, "limits") or [{}])[0]
    rows: list[Record] = []
    theirs = {(r["slots"], r["context"]): r["tokens_per_s"] for r in read(out, "vllm")}
    for r in read(out, "decode"):
        if "error" in r:
            rows.append({"what": f"decode {r['decoding']}", "measured": f"failed: {r['error']}"})
            continue
        what = f"decode {r['decoding']}, {r['size']}, H={r['slots']}, context {r['context']}"
        share = r["bytes_per_s"] / limit["bytes_per_s"] if limit else None
        rows.append(_row(what, f"{r['tokens_per_s']:.0f} tok/s", share, "bandwidth"))
        if (r["slots"], r["context"]) in theirs:
            rows[-1]["x vLLM"] = r["tokens_per_s"] / theirs[r["slots"], r["context"]]
    for r in read(out, "refill"):
        what = f"generation with new prompts, {r['length']} tokens each, held for {r['hold']} steps"
        rows.append({"what": what, "measured": f"{r['tokens_per_s']:.0f} tok/s"})
    for r in read(out, "train"):
        share = r["flop_per_s"] / limit["flop_per_s"] if limit else None
        rows.append(_row(f"training {r['runner']}, {r['size']}", f"{r['tokens_per_s']:.0f} tok/s", share, "mfu"))
    for r in read(out, "shared"):
        prompt, answer = r["workload"].split(":")
        what = f"step, prompts of {prompt} and answers of {answer} tokens, {'shared' if r['shared'] else 'separate'}"
        rows.append({"what": what, "measured": f"{r['step_s']:.2f} s, {r['peak_bytes'] / 1e9:.1f} GB"})
    if updates := read(out, "update"):
        times_s = {part: min(r[part] for r in updates) for part in ("send_s", "poll_s", "pause_s", "host_pause_s")}
        rows += [{"what": f"update: {part[:-2]}", "measured": f"{time_s:.3f} s"} for part, time_s in times_s.items()]
    for name in ("both", "both-mps"):
        for r in read(out, name):
            what = f"both ends on one GPU, {'with' if r['mps'] else 'without'} MPS: {r['end']}"
            rows.append({"what": what, "measured": f"{r['together']:.0f} tok/s", "share": r["kept"], "of": "alone"})
    for r in (*read(out, "runs"), *read(out, "runs-mps")):
        times_s = r["times_s"][ROUND - 1 :]  # without the first round, which has to fill the pipeline
        step_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
        rows.append({"what": f"run, {r['schedule']}{', with MPS' * r['mps']}", "measured": f"{step_s:.2f} s a step"})
    missing = [name for name in ("limits", "decode", "refill", "train", "update", "both", "runs") if not read(out, name)]
    return [*rows, *({"what": name, "measured": "no result: see its log"} for name in missing)]


def _row(what: str, measured: str, share: float | None, goal: str) -> Record:
    met = None if share is None else ("yes" if share >= GOALS[goal] else "no")
    return {"what": what, "measured": measured, "share": share, "of": goal, "goal": GOALS[goal], "met": met}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=[*STEPS, "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="1.5b", choices=list(SIZES))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1000])
    parser.add_argument("--ways", nargs="+", default=["static"], help="decode: values of engine.decoding")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=8.0, help="both: length of each measurement")
    parser.add_argument("--mps", action="store_true", help="both, runs: note that the CUDA multi-process service runs")
    parser.add_argument("--schedules", nargs="+", default=["pipeline", "conventional"], help="runs: of these kinds")
    parser.add_argument("--end", choices=["decode", "train"], help="loop: which end")
    options = parser.parse_args()
    if options.step == "table":
        text = common.markdown(table(options.out))
        (options.out / "table.md").write_text(text + "\n")
        print(text)
        return
    records = STEPS[options.step](options)
    if options.step != "loop":
        save(options, records)


if __name__ == "__main__":
    main()
