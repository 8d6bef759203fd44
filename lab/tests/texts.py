"""Text for tests: files of documents, and the documents of tokens that are bytes."""

from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT, SPLITS, Tokens, token_ids


def write_text(path, *documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("\n<|endoftext|>\n".join(documents).encode())
    return path


def decode(folder):
    """The documents of both splits of a folder that was prepared with the fixture `letters`."""
    splits = []
    for split in SPLITS:
        numbers = token_ids(Tokens.open(folder, split).data).tolist()
        assert not numbers or numbers[-1] == END_OF_TEXT
        splits.append("".join("\n<|endoftext|>\n" if number == END_OF_TEXT else chr(number) for number in numbers))
    return [text.encode("latin-1").decode().split("\n<|endoftext|>\n")[:-1] for text in splits]
