"""From the name of a text, or a folder of text, to its tokens: looked for, downloaded and tokenized as need be."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mvngrad_lab import pool
from mvngrad_lab.tasks.files import OnProgress, data_folder, sha256
from mvngrad_lab.tasks.language.data import text, text_bpe, text_corpora
from mvngrad_lab.tasks.language.data.text_documents import documents, pieces
from mvngrad_lab.tasks.language.data.tokens import SPLITS, Tokens, found

Progress = Callable[[int, int], Any]
"""Told how many bytes of text are tokenized, and of how many."""


def prepared(
    name: str,
    data: Path | None = None,
    *,
    workers: int | None = None,
    on_progress: Progress = lambda done, total: None,
    on_download: OnProgress | None = None,
) -> Path:
    """The folder with the tokens of wikitext103, openwebtext, wikipedia_en or wikitext103-validation.

    What is missing is made, and the text itself downloaded if need be and possible. What is there is verified and kept,
    and where the text is gone the tokens do.

    Args:
        name: of the text.
        data: the folder that has the text, and gets tokens/`name`; that of MVNGRAD_DATA or the cache by default. If it
            has gpt2_bpe, GPT-2's vocabulary is taken from there.
        workers: processes that tokenize; as many as there are cores by default.
        on_progress: called with the bytes of text that are tokenized, and all.
        on_download: called with the bytes downloaded, and all.
    """
    if name in text_corpora.ARCHIVES:
        data_folder(data).mkdir(parents=True, exist_ok=True)
    try:
        corpus = text_corpora.corpus(name, data)
    except FileNotFoundError:
        if (kept := found(name, data)) is not None:
            for split in SPLITS:
                Tokens.open(kept, split, checksum=True)
            return kept
        if name not in text_corpora.ARCHIVES:
            raise
        corpus = text_corpora.corpus(name, text_corpora.download(name, data, on_download))
    return _prepare(corpus, name, data, workers, on_progress)


def prepare_folder(
    folder: Path,
    data: Path | None = None,
    *,
    workers: int | None = None,
    on_progress: Progress = lambda done, total: None,
) -> tuple[str, Path]:
    """The tokens of all .txt files of a folder: the name that recipes know them by, and where they are.

    The name ends in a hash of the text, the split and the tokenizer, so that two runs on `text` of one name saw the
    same tokens. Arguments are those of `prepared`.

    Raises:
        ValueError: nothing would be left to train or to validate on; found before anything is tokenized.
    """
    corpus = text_corpora.in_folder(folder)
    _check_usable(folder, corpus)
    data_folder(data).mkdir(parents=True, exist_ok=True)
    held_out = corpus.validation if isinstance(corpus.validation, float) else list(map(sha256, corpus.validation))
    content = json.dumps([text_bpe.NAME, list(map(sha256, corpus.files)), held_out])
    called = re.sub(r"[^A-Za-z0-9_]+", "-", folder.resolve().name).strip("-") or "text"
    name = f"{called}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    return name, _prepare(corpus, name, data, workers, on_progress)


def _check_usable(folder: Path, corpus: text_corpora.Corpus) -> None:
    """Refuse a folder that leaves nothing for one of the splits; of a large one the first documents answer that."""
    if isinstance(share := corpus.validation, float):
        drawn = [(text.for_validation(document, share) for document in _documents(corpus.files)) for _ in SPLITS]
        train, validation = not all(drawn[0]), any(drawn[1])
        why = f"none of its documents is among the {share:.1%} that are held out"
    else:
        train, validation = (any(_documents(files)) for files in (corpus.files, share))
        why = f"{text_corpora.HELD_OUT} is blank"
    if not train:
        raise ValueError(f"{folder} has nothing to train on: its .txt files are blank, or held out")
    if not validation:
        raise ValueError(
            f"{folder} has nothing to validate on: {why}; put some of its text into {folder / text_corpora.HELD_OUT}"
        )


def _documents(files: Sequence[Path]) -> Iterator[str]:
    return (document for path in files for piece in pieces(path) for document in documents(piece))


def _prepare(
    corpus: text_corpora.Corpus, name: str, data: Path | None, workers: int | None, on_progress: Progress
) -> Path:
    """Where the tokens are already they are kept, or made again if they are not of this text."""
    folder = found(name, data) or data_folder(data) / "tokens" / name
    text.prepare(
        corpus.files,
        folder,
        source=corpus.source,
        validation=corpus.validation,
        vocabulary=data if data is not None and (data / "gpt2_bpe").is_dir() else None,
        workers=pool.count_cores() if workers is None else workers,
        on_progress=on_progress,
    )
    return folder
