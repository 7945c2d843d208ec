"""Set the peers up, once: `python -m benchmarks.peers.setup [llama-server] [vllm]`, both unless named.

Everything goes to `$FORKKV_PEERS_DIR` (default `~/.cache/forkkv/peers`): about 3.5 GB for vLLM's environment, 1 GB for
llama-server's source and build, which takes about ten minutes of two cores. transformers + PEFT are in the
project's own environment (`pip install -e '.[dev]'`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from benchmarks.peers import llama_server, vllm_server

SETUPS = {"llama-server": llama_server.set_up, "vllm": vllm_server.set_up}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"those to set up: {', '.join(SETUPS)} (default: all)")
    chosen = parser.parse_args().peers or list(SETUPS)
    if unknown := sorted(set(chosen) - set(SETUPS)):
        parser.error(f"nothing to set up for {', '.join(unknown)}")
    failed = False
    for name in chosen:
        began = time.monotonic()
        try:
            SETUPS[name]()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: not set up: {error}", file=sys.stderr)
            failed = True
        else:
            print(f"{name}: set up in {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
