"""Measure how a server holds under abuse, and how much it slows down other clients. Linux only.

    python tools/abuse_server.py --record abuse [--case malformed ...] [-- OPTIONS OF minillm serve]

With `-- --attention-sinks 4 --attention-window 1024`, prompts and bodies may be as large as the server accepts.

During most attacks, one client streams tokens and another polls /health: `stream_gap_s` and `health_s` are their
longest waits. Memory is that of the server's processes, in MB.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]

from abuse import bodies, clients, connections, ends, overload  # noqa: E402, F401 (they enter their cases)

from minillm.bench import records  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=clients.CASES, help="default: all; repeatable")
    parser.add_argument("--record", help="write the results to this file, or to the committed record of this name")
    parser.add_argument("serve", nargs="*", help="options of minillm serve")
    arguments = parser.parse_args()
    clients.SERVE.extend(arguments.serve)
    begun, results = records.begin(arguments.record), []
    for name in arguments.case or clients.CASES:
        found = asyncio.run(clients.CASES[name]())
        results.append({"case": name, "what": (clients.CASES[name].__doc__ or "").splitlines()[0], **found})
        print(json.dumps(results[-1]), flush=True)
        if arguments.record is not None:
            records.write(records.record(results, begun, model="tiny-gemma"), arguments.record)


if __name__ == "__main__":
    main()
