"""A process that imports one release of vLLM and runs replays in it: a line of JSON in, a pickled run in base64 out.

`python -m kvguard.fault_injection.scenarios.replay_process RELEASE`, with that release first on PYTHONPATH. It ends
when its standard input does.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys


def main() -> int:
    """Serve until there is nothing more to do; 1 if another release was imported."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    # vLLM prints on standard output, which is for answers only.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import structlog
    import structlog.testing
    import vllm

    if vllm.__version__.partition("+")[0] != sys.argv[1]:
        return 1
    # Violations are caused on purpose here, and are in the answers.
    structlog.configure(logger_factory=lambda *args: structlog.testing.ReturnLogger())
    from kvguard.fault_injection.scenarios.releases import local_replay

    for line in sys.stdin:
        what = json.loads(line)
        run = local_replay("vllm", what.pop("name"))(**what)
        print(base64.b64encode(pickle.dumps(run)).decode("ascii"), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
