"""Text to tokens: `prepare` writes the folder that `mvngrad_lab.tasks.language.data.tokens` reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mvngrad_lab import pool
from mvngrad_lab.store import write_atomic
from mvngrad_lab.tasks.files import name_full_disk, sha256
from mvngrad_lab.tasks.language.data import text_bpe
from mvngrad_lab.tasks.language.data.text_documents import Piece, documents, pieces
from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT, MANIFEST, SPLITS, Manifest, Part, Tokens

VALIDATION_SHARE = 0.005
VERIFIED = "sha256 verified"
"""How a `source` ends if the text was compared with what was published."""
_encoding: Any = None
"""A worker's, loaded once."""


@dataclass(frozen=True)
class Shard:
    """A piece and where its tokens go: first those to train on, then those to validate on."""

    piece: Piece
    share: float
    """Of its documents, how many are for validation."""
    path: Path

    @property
    def note(self) -> Path:
        """Written last: documents and tokens of each split."""
        return self.path.with_suffix(".json")

    def done(self) -> dict[str, list[int]] | None:
        """What the note says; None if the shard is still to be made."""
        try:
            found: dict[str, list[int]] = json.loads(self.note.read_text(encoding="utf-8"))
            return found if self.path.stat().st_size == 2 * sum(tokens for _, tokens in found.values()) else None
        except (OSError, ValueError, AttributeError):
            return None


def prepare(
    files: Sequence[Path],
    folder: Path,
    *,
    source: str,
    validation: float | Sequence[Path] = VALIDATION_SHARE,
    vocabulary: Path | None = None,
    workers: int = 1,
    on_progress: Callable[[int, int], Any] = lambda done, total: None,
) -> Manifest:
    """Write the tokens of `files` into `folder`, or go on with that; what is there already of the same is kept.

    The result does not depend on the number of workers. A process that dies leaves whole shards, and the next one makes
    the others; the files appear under their names when all is done, the manifest last.

    Args:
        files: of text, in the order they are to have; `text_documents` says of which kinds.
        folder: where train.bin, validation.bin and manifest.json go. Twice their size is needed while they are joined.
        source: what the text is, in words for a report.
        validation: files of their own, or the share of documents held out. A document is held out by its content
            alone: neither order nor company matters, and of two that are the same not one is trained on.
        vocabulary: a folder that has GPT-2's encoder.json and vocab.bpe; None looks where data is, then downloads.
        workers: processes.
        on_progress: called with the bytes of text that are done, and all.

    Raises:
        ValueError: nothing is left to train on, though not all was to be held out; found before anything is written.
    """
    share = 0.0 if not isinstance(validation, (int, float)) else float(validation)
    if not 0 <= share <= 1:
        raise ValueError(f"validation={validation} is not a share; give a number from 0 to 1, or files")
    held_out = [] if isinstance(validation, (int, float)) else list(validation)
    if not files:
        raise ValueError("files is empty: there is no text to prepare")
    known = tuple((path.name, path.stat().st_size, sha256(path)) for path in (*files, *held_out))
    told = (
        f"validation: {', '.join(path.name for path in held_out)}"
        if held_out
        else f"validation: documents whose sha256 begins, as a fraction, below {share}"
    )
    if (kept := _kept(folder, source, told, known)) is not None:
        return kept
    if share < 1 and all(
        for_validation(document, share) for path in files for piece in pieces(path) for document in documents(piece)
    ):
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{files[0].parent} has nothing to train on: {names} is blank, or held out; put text there")
    (folder / MANIFEST).unlink(missing_ok=True)
    home = folder / "shards"
    home.mkdir(parents=True, exist_ok=True)
    shares = [share] * len(files) + [1.0] * len(held_out)
    shards = [
        Shard(piece, part, home / f"{_key(digest, piece, part)}.bin")
        for path, part, (_, _, digest) in zip((*files, *held_out), shares, known, strict=True)
        for piece in pieces(path)
    ]
    missing = [shard for shard in shards if shard.done() is None]
    total = sum(shard.piece.size for shard in shards)
    done = total - sum(shard.piece.size for shard in missing)
    on_progress(done, total)
    if missing:
        text_bpe.encoding(vocabulary)  # else each of the processes would fail, in its own words
        for shard, _ in pool.run_jobs(_make, missing, workers, _load, vocabulary):
            done += shard.piece.size
            on_progress(done, total)
    train, held = (_join(shards, split, folder) for split in SPLITS)
    manifest = Manifest(source, text_bpe.NAME, told, known, train, held)
    manifest.write(folder)
    shutil.rmtree(home)
    return manifest


def _kept(folder: Path, source: str, told: str, known: tuple[tuple[str, int, str], ...]) -> Manifest | None:
    """The manifest of a folder that holds just this already.

    That the text was verified stays true after what it was compared with is gone: its sha256 is the same.
    """
    try:
        found, _ = (Tokens.open(folder, split, checksum=True).manifest for split in SPLITS)
    except (OSError, ValueError):
        return None
    if (found.tokenizer, found.split, found.files) != (text_bpe.NAME, told, known):
        return None
    if found.source != source and not found.source.endswith(VERIFIED):
        found = replace(found, source=source)
        found.write(folder)
    return found


def _key(digest: str, piece: Piece, share: float) -> str:
    """A name that a shard has only if it would hold the same."""
    settings = f"{text_bpe.NAME} {digest} {piece.start} {piece.stop} {share}"
    return hashlib.sha256(settings.encode()).hexdigest()[:24]


def _load(vocabulary: Path | None) -> None:
    global _encoding
    _encoding = text_bpe.encoding(vocabulary)


def _make(shard: Shard) -> None:
    found = {split: array("H") for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    for text in documents(shard.piece):
        split = SPLITS[for_validation(text, shard.share)]
        counts[split] += 1
        found[split].extend(_encoding.encode_ordinary(text))
        found[split].append(END_OF_TEXT)
    partial = shard.path.with_suffix(f".{os.getpid()}.part")
    with name_full_disk(partial):
        partial.write_bytes(b"".join(found[split].tobytes() for split in SPLITS))
    partial.replace(shard.path)
    write_atomic(shard.note, json.dumps({split: [counts[split], len(found[split])] for split in SPLITS}))


def for_validation(document: str, share: float) -> bool:
    """Whether a document is for validation: its sha256, read as a fraction from 0 to below 1, is below the share."""
    return int.from_bytes(hashlib.sha256(document.encode()).digest()[:6], "big") / 2**48 < share


def _join(shards: Sequence[Shard], split: str, folder: Path) -> Part:
    """One file of what all shards have of a split, in the order of the text."""
    target = folder / f"{split}.bin"
    partial = target.with_suffix(".part")
    found, tokens, count = hashlib.sha256(), 0, 0
    with name_full_disk(partial), partial.open("wb") as out:
        for shard in shards:
            note = shard.done()
            if note is None:
                raise RuntimeError(f"{shard.path} vanished while {target} was written; start again")
            content = shard.path.read_bytes()
            middle = 2 * note["train"][1]
            content = content[:middle] if split == "train" else content[middle:]
            out.write(content)
            found.update(content)
            count, tokens = count + note[split][0], tokens + note[split][1]
        out.flush()
        os.fsync(out.fileno())
    partial.replace(target)
    return Part(tokens, count, found.hexdigest())
