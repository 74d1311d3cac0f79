"""lm-eval's own command with the model `conserve` in it.

lm-eval knows the models of its own package alone, and asks no entry points for others. So this command registers
ours and then is `lm_eval`. A program calls `register` of `lm_eval_model`.
"""

import sys

from conserve.errors import ConserveError
from conserve.nightly.harness.libraries import require


def main() -> None:
    """Run lm-eval's command."""
    try:
        require("lm_eval")
        from lm_eval.__main__ import cli_evaluate

        from conserve.nightly.harness.lm_eval_model import register

        register()
        cli_evaluate()
    except ConserveError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
