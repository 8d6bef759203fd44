"""GPT-2's byte pair encoding, through tiktoken: from a local vocabulary, or from the one tiktoken downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mvngrad_lab.tasks.files import KnownFile, find_files, read_verified
from mvngrad_lab.tasks.language.data.tokens import END_OF_TEXT

if TYPE_CHECKING:
    from tiktoken import Encoding

FILES = (
    KnownFile("encoder.json", 1042301, "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    KnownFile("vocab.bpe", 456318, "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
)
"""As OpenAI published them; tiktoken expects the same checksums."""
PATTERN = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's words: no token reaches across two of them."""
NAME = f"gpt2, vocab.bpe sha256 {FILES[1].sha256}"


def encoding(vocabulary: Path | None = None) -> Encoding:
    """The encoding, from `vocabulary`, or gpt2_bpe in the folder of MVNGRAD_DATA or the cache, or else downloaded.

    Args:
        vocabulary: a folder that has encoder.json and vocab.bpe, or gpt2_bpe/ with them.
    """
    try:
        import tiktoken
        from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    except ImportError as error:
        raise ImportError("preparing text needs tiktoken: pip install mvngrad-lab") from error
    paths = find_files("gpt2_bpe", FILES, vocabulary)
    if paths is None:
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            raise RuntimeError(
                f"GPT-2's vocabulary cannot be downloaded ({type(error).__name__}); put "
                f"{' and '.join(file.name for file in FILES)} into gpt2_bpe/ of the folder of data"
            ) from error
    for path, known in zip(paths, FILES, strict=True):
        read_verified(path, known)
    encoder, merges = map(str, paths)
    ranks = data_gym_to_mergeable_bpe_ranks(merges, encoder, FILES[1].sha256, FILES[0].sha256)
    return tiktoken.Encoding(
        "gpt2",
        explicit_n_vocab=END_OF_TEXT + 1,
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )
