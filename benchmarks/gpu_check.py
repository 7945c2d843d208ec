"""Everything that only a GPU can tell, in one call under 9 minutes.

    python benchmarks/gpu_check.py [--sections NAME,...] [--budget-s 520] [--shape 8b] [--out FOLDER]
    python benchmarks/gpu_check.py --device cpu --tiny

Sections: `correctness` (all Triton kernels against the reference), `engine` (the in-process engine on an 8B shape with
random weights: eight adapters on one 16k document, `none` and `fork`), `decode` (1, 8, 32 agents on 4k, 16k, 32k
tokens: grouped, ungrouped, torch SDPA on private K, V), `prefill` (against torch SDPA on materialised K, V), `layer`
(every other kernel), `graphs` (a decode step with and without CUDA graphs). Times are medians over floors from copies
and matrix products measured in the same run. Writes `<date>-<card>.json` and `.md` into `benchmarks/results/`.

`--device cpu --tiny` does all of it with tiny sizes on a CPU, the Triton kernels in Triton's interpreter in float32 and
float16: it shows that this program runs, and its times mean nothing.

Needs torch, triton, numpy, safetensors and tqdm, nothing else: no fastapi, uvicorn, pydantic, msgspec, pyzmq, psutil,
tokenizers or gguf, and transformers only because torch users have it. forkkv need not be installed.

Sections run in a child process. One that raises is reported with its traceback; one that takes the process down (or
the CUDA context, or too long) is reported too, and a new child runs the rest. Exit status: 0 all is well, 1 a section
failed, found wrong results or was cut short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "kernels", ROOT):
    sys.path.insert(0, str(folder))

SECTIONS = ("rates", "correctness", "engine", "decode", "prefill", "layer", "graphs")
_SHARES = {"rates": 0.03, "correctness": 0.33, "engine": 0.32, "decode": 0.15, "prefill": 0.07, "layer": 0.08}
"""Most of the budget that a section may use; what is left over stays for later ones."""
_GRACE_S = 10.0
_RESTART = 3
"""Exit status of a child whose device is unusable after a failure."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--shape", default="8b", help="named shape of lib/steps.py (default 8b; tiny with --tiny)")
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="NAME,...")
    parser.add_argument("--budget-s", type=float, default=520.0, help="seconds for everything (default 520)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", metavar="FOLDER")
    parser.add_argument("--backend", metavar="NAME", help="attention backend of the engine and of timings")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cpu" and not args.tiny:
        parser.error("--device cpu needs --tiny")
    unknown = sorted(set(args.sections.split(",")) - set(SECTIONS))
    if unknown:
        parser.error(f"--sections: no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if args.tiny:
        args.shape = "tiny"
    return args


# ---- parent -----------------------------------------------------------------------------------------------------


def main() -> int:
    args = parse()
    if args.child is not None:
        return run_child(args)
    began = time.monotonic()
    left = [name for name in SECTIONS if name in args.sections.split(",")]
    done: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="forkkv-gpu-check-") as folder:
        while left:
            budget = args.budget_s - (time.monotonic() - began)
            found = run_once(left, budget, Path(folder) / "sections.json", args)
            done |= found
            left = [name for name in left if name not in found]
    report = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "seconds": round(time.monotonic() - began, 1),
        "arguments": {key: str(value) for key, value in vars(args).items() if key != "child"},
        "environment": done.pop("environment", {}),
        "sections": done,
    }
    print("\n" + write(report, args.out, args.tiny))
    return 0 if all(section["ok"] for section in done.values()) else 1


def run_once(names: list[str], budget: float, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run sections in a child until all are done or it dies; what they found. At least one section is in it."""
    file.unlink(missing_ok=True)
    if budget < _GRACE_S:
        return {name: failure("not run: out of time") for name in names}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(file), "--sections", ",".join(names)]
    command += ["--device", args.device, "--shape", args.shape, "--budget-s", f"{budget:.1f}"]
    command += ["--tiny"] if args.tiny else []
    command += ["--backend", args.backend] if args.backend else []
    environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if args.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    status = "ended"
    try:
        code = subprocess.run(command, env=environment, timeout=budget + _GRACE_S).returncode
        status = f"ended with status {code}"
    except subprocess.TimeoutExpired:
        status = "was stopped: out of time"
    content = json.loads(file.read_text()) if file.exists() else {}
    running, found = content.pop("running", None), content
    if not any(name in found for name in names) or (running and running not in found):
        found[running or names[0]] = failure(f"the process {status} in this section")
    return found


def failure(error: str) -> dict[str, Any]:
    """What stands for a section without a result."""
    return {"ok": False, "error": error}


def write(report: dict[str, Any], folder: Path, tiny: bool) -> str:
    """Write the JSON and the Markdown file; returns the Markdown text."""
    from benchmarks.lib.gpu_report import markdown_report

    card = report["environment"].get("card", "unknown")
    slug = "-".join("".join(c if c.isalnum() else " " for c in card.lower()).split())
    stem = folder / f"{report['date'][:10]}-{slug}{'-tiny' if tiny else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown_report(report)
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text + "\n")
    return f"{text}\n\nwritten: {stem}.json, {stem}.md"


# ---- child ------------------------------------------------------------------------------------------------------


def run_child(args: argparse.Namespace) -> int:
    """Run the sections one after another; the file holds all results so far and the section that runs."""
    from benchmarks.lib.gpu_setup import Setup, device_is_usable, run_section

    setup = Setup.make(args)
    done: dict[str, Any] = {"environment": setup.environment()}
    deadline = time.monotonic() + args.budget_s
    for name in args.sections.split(","):
        store(args.child, {**done, "running": name})
        left = deadline - time.monotonic()
        share = min(left, _SHARES.get(name, 1.0) * args.budget_s)
        done[name] = run_section(name, setup, share)
        store(args.child, done)
        print(f"{name}: {'ok' if done[name]['ok'] else 'FAILED'}, {done[name]['seconds']:.1f} s", flush=True)
        if not done[name]["ok"] and not device_is_usable(setup):
            return _RESTART
    return 0


def store(file: Path, content: dict[str, Any]) -> None:
    """Replace the file at once, so that the parent never reads half of it."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main())
