"""Write the generated parts of docs/ and deploy/: `python -m tools.docs`."""

from tools.docs.generated import FILES


def main() -> None:
    """Write each file whose contents have changed, and name it."""
    for path, make in FILES.items():
        text = make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
