"""``python -m drafter COMMAND``: one entry, few words. Each command imports only what it needs.

User errors are one line on stderr and an exit code from :mod:`drafter.errors`.
"""

from __future__ import annotations

import sys

from drafter.errors import DrafterError

if __name__ == "__main__":
    from drafter.cli import main

    try:
        sys.exit(main(sys.argv[1:]))
    except DrafterError as error:
        print(f"drafter: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)  # whoever read our output has gone
    except OSError as error:
        print(f"drafter: {error.filename or 'the host'}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
