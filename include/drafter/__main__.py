"""``python -m drafter COMMAND``: one entry, few words. Each command imports only what it needs.

User errors are one line on stderr and an exit code from :mod:`drafter.errors`.
"""

from __future__ import annotations

import os
import signal
import sys

from drafter.errors import DrafterError

if __name__ == "__main__":
    from drafter.cli import main

    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        sys.exit(code)
    except DrafterError as error:
        print(f"drafter: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read our output has gone; Python flushes once more at its end, to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        print(f"drafter: {error.filename or 'the host'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
