"""`python -m conserve`, and what the `conserve` script calls."""

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    from conserve.cli import signals, stdout

    signals.end_as_first_process()
    stdout.guard()
    sys.exit(stdout.run_flushed(answer))


def answer() -> int:
    """Answer the command line, without typer where that can be; returns the exit code."""
    from conserve.cli.shortcuts import answer

    try:
        code = answer(sys.argv[1:])
        if code is None:
            from conserve.cli.app import main as run

            code = run()
    except PermissionError as error:  # of a folder that this user may not enter: any look into it may meet it
        if error.filename is None:
            raise
        from conserve.cli import output
        from conserve.errors import StoreForbidden

        return output.say_error(StoreForbidden.of(error))
    return code


if __name__ == "__main__":
    main()
