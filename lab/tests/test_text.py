"""Text is found, downloaded, verified and cut into documents; a user's folder is named by its content."""

import dataclasses
import io
import json
import lzma
import tarfile
import zipfile

import pytest
from mirror import known_file
from real import DATA
from texts import decode, write_text

from mvngrad_lab.errors import InvalidInput
from mvngrad_lab.tasks.files import DamagedFile
from mvngrad_lab.tasks.language.data import prepare, text
from mvngrad_lab.tasks.language.data.prepare import prepare_folder_tokens, prepare_tokens
from mvngrad_lab.tasks.language.data.text import download_text, find_corpus, folder_corpus, read_documents
from mvngrad_lab.tasks.language.data.tokens import Manifest, require_tokens
from mvngrad_lab.tasks.language.recipe import wikitext103

pytestmark = pytest.mark.usefixtures("no_data")


# From files to documents


@pytest.mark.parametrize("size", [1, 7, 30, 10**6])
def test_pieces_of_any_size_have_the_same_documents(tmp_path, monkeypatch, size):
    monkeypatch.setattr(text, "PIECE_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(
        b"<|endoftext|>\none\n<|endoftext|>\n<|endoftext|>\r\ntwo <|endoftext|> lines\n\n\n<|endoftext|>\n "
    )
    assert list(read_documents(path)) == ["one", "two <|endoftext|> lines\n\n"]
    path.write_bytes(b"")
    assert list(read_documents(path)) == []


def test_wikitext_articles_begin_with_their_headings(tmp_path):
    articles = [" = One = \n \n text \n = 1 henry = \n \n = = Part = = \n \n", " = Two ( film ) = \n \n more \n"]
    path = tmp_path / "wiki.train.tokens"
    path.write_text(" \n" + articles[0] + " \n" + articles[1])
    assert list(read_documents(path)) == [" \n" + articles[0] + " \n", articles[1]]


@pytest.mark.skipif(not DATA.exists(), reason="needs WikiText-103's validation text")
@pytest.mark.parametrize("part", ["valid", "test"])
def test_wikitext103_has_sixty_articles_in_each_text(tmp_path, part):
    content = lzma.decompress((DATA / "wikitext103" / f"wiki.{part}.tokens.xz").read_bytes())
    path = tmp_path / f"wiki.{part}.tokens"
    path.write_bytes(content)
    documents = list(read_documents(path))
    assert "".join(documents).encode() == content
    assert len(documents) == 60


def archive(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def openwebtext(*subsets):
    packed = {f"openwebtext/urlsf_subset00-{i}_data.xz": lzma.compress(archive(each)) for i, each in enumerate(subsets)}
    return archive(packed)


def test_openwebtext_is_read_from_the_archives_in_its_archive(tmp_path):
    path = tmp_path / "openwebtext.tar"
    path.write_bytes(openwebtext({"1.txt": b"one\n\n\n\nmore\n", "2.txt": b" \n"}, {"3.txt": "zwölf".encode()}))
    assert len(text.split_file(path)) == 2
    assert list(read_documents(path)) == ["one\n\nmore", "zwölf"]
    path.write_bytes(lzma.compress(path.read_bytes()))
    with pytest.raises(ValueError, match="not a plain tar archive"):
        text.split_file(path)


def test_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"gr\xf6\xdfer")
    with pytest.raises(ValueError, match=r"a\.txt, in bytes 0 to 6: not UTF-8"):
        list(read_documents(path))
    with pytest.raises(ValueError, match=r"a\.pdf is no text by its name"):
        text.split_file(tmp_path / "a.pdf")


# Where text comes from

VALID = b" \n = valid = \n \n words \n"


@pytest.fixture
def published(mirror, monkeypatch):
    """A mirror with small archives in place of the published ones."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part in ("train", "valid", "test"):
            archive.writestr(f"wikitext-103/wiki.{part}.tokens", VALID.replace(b"valid", part.encode()))
    contents = {
        "wikitext103": packed.getvalue(),
        "openwebtext": lzma.compress(openwebtext({"1.txt": b"one"}, {"2.txt": b"two"})),
    }
    for name, content in contents.items():
        known = known_file(text.ARCHIVES[name].name, content)
        monkeypatch.setitem(text.ARCHIVES, name, known)
        monkeypatch.setitem(text.MIRRORS, name, (f"{mirror.url}/{known.name}",))
        mirror.files[f"/{known.name}"] = content
    monkeypatch.setattr(text, "WIKITEXT103_VALIDATION", known_file("wiki.valid.tokens", VALID))
    return mirror


each_archive = pytest.mark.parametrize("name", ["wikitext103", "openwebtext"])


@each_archive
@pytest.mark.usefixtures("letters")
def test_published_text_is_downloaded_once_verified_and_prepared(tmp_path, monkeypatch, published, name):
    with pytest.raises(FileNotFoundError, match=f"mvngrad data get {name}"):
        find_corpus(name)
    reports = []
    folder = prepare_tokens(name, tmp_path, workers=1, on_download=lambda *counts: reports.append(counts))
    assert folder == tmp_path / "tokens" / name
    assert reports[-1] == (text.ARCHIVES[name].size,) * 2
    assert decode(folder)[0] == ([VALID.decode().replace("valid", "train")] if "wiki" in name else ["one", "two"])
    assert download_text(name, tmp_path) == tmp_path
    assert len(published.requests) == 1
    archive = tmp_path / name / text.ARCHIVES[name].name
    archive.write_bytes(archive.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match="download it again"):
        download_text(name, tmp_path)
    monkeypatch.setenv("MVNGRAD_DATA", str(tmp_path / "variable"))
    assert prepare_tokens(name, workers=1) == tmp_path / "variable" / "tokens" / name


@each_archive
@pytest.mark.usefixtures("published")
def test_only_text_equal_to_its_archive_is_called_verified(tmp_path, name):
    download_text(name, tmp_path)
    known = text.ARCHIVES[name]
    archive, path = tmp_path / name / known.name, find_corpus(name, tmp_path).files[0]
    assert find_corpus(name, tmp_path).source.endswith("training text as published, sha256 verified")
    content = path.read_bytes()
    for other in (content + b"x", content[:-1], b"x" + content[1:]):
        path.write_bytes(other)
        with pytest.raises(DamagedFile, match=rf"{path.name} is not what .*{known.name} holds; delete it"):
            find_corpus(name, tmp_path)
    archive.rename(tmp_path / known.name)  # outside the folder of its name
    with pytest.raises(DamagedFile, match="is not what"):
        find_corpus(name, tmp_path)
    (tmp_path / known.name).write_bytes(b"another archive")
    with pytest.raises(DamagedFile, match=f"is not {known.name} as published"):
        find_corpus(name, tmp_path)
    (tmp_path / known.name).unlink()
    assert find_corpus(name, tmp_path).source.endswith("training text not verified")


@pytest.mark.usefixtures("published")
def test_subsets_of_openwebtext_are_not_called_verified(tmp_path):
    download_text("openwebtext", tmp_path)
    (tmp_path / "openwebtext" / "openwebtext.tar").rename(tmp_path / "openwebtext" / "urlsf_subset00.tar")
    source = "OpenWebText, 1 of its 21 subsets, training text not verified"
    assert find_corpus("openwebtext", tmp_path).source == source


@each_archive
@pytest.mark.usefixtures("letters")
def test_archive_outside_the_folder_of_its_name_is_used(tmp_path, published, name):
    download_text(name, tmp_path / "first")
    known = text.ARCHIVES[name]
    (tmp_path / "first" / name / known.name).rename(tmp_path / known.name)
    folder = prepare_tokens(name, tmp_path, workers=1)
    assert len(published.requests) == 1
    assert Manifest.read(folder).source.endswith("sha256 verified")


@pytest.mark.usefixtures("letters")
def test_validation_text_of_wikitext103_alone(tmp_path, monkeypatch):
    path = write_text(tmp_path / "wikitext103" / "wiki.valid.tokens", VALID.decode())
    with pytest.raises(DamagedFile, match=r"is not wiki\.valid\.tokens as published"):
        prepare_tokens("wikitext103-validation", tmp_path, workers=1)
    monkeypatch.setattr(text, "WIKITEXT103_VALIDATION", known_file(path.name, VALID))
    folder = prepare_tokens("wikitext103-validation", tmp_path, workers=1)
    assert folder == tmp_path / "tokens" / "wikitext103-validation"
    assert decode(folder) == [[], [VALID.decode()]]


@pytest.mark.usefixtures("letters")
def test_text_is_prepared_once_and_tokens_outlive_it(tmp_path, monkeypatch):
    home, seen = tmp_path / "home", []
    path = write_text(home / "wikipedia_en" / "wikipedia_en.0.txt", "one", "two")
    folder = prepare_tokens("wikipedia_en", home, workers=1, on_progress=lambda *counts: seen.append(counts))
    assert folder == home / "tokens" / "wikipedia_en" == require_tokens("wikipedia_en", home)
    assert decode(folder)[0] == ["one", "two"]
    assert "stand-in" in Manifest.read(folder).source
    assert seen[-1] == (path.stat().st_size,) * 2
    monkeypatch.setattr(prepare, "_write_shard", None)
    assert prepare_tokens("wikipedia_en", home, workers=1) == folder
    path.unlink()
    assert prepare_tokens("wikipedia_en", home, workers=1) == folder
    (folder / "train.bin").write_bytes(b"\0" * (folder / "train.bin").stat().st_size)
    with pytest.raises(DamagedFile, match=r"sha256 .* Delete its folder"):
        prepare_tokens("wikipedia_en", home, workers=1)


def test_unknown_or_missing_text_and_a_file_in_place_of_the_folder_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"wikipedia_en is not in .*; name a folder that has it"):
        prepare_tokens("wikipedia_en", tmp_path)
    with pytest.raises(ValueError, match="name='c4' is no known text"):
        prepare_tokens("c4", tmp_path)
    (tmp_path / "file").touch()
    mine = write_text(tmp_path / "mine" / "a.txt", "one").parent
    write_text(mine / "validation.txt", "two")
    for make, given in ((prepare_tokens, "wikitext103"), (prepare_folder_tokens, mine)):
        with pytest.raises(InvalidInput, match=r"file', given as --data or folder, is not a folder; name one"):
            make(given, tmp_path / "file")


# A user's folder


def test_folder_is_read_in_the_order_of_its_names(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", "d.md"):
        write_text(tmp_path / "mine" / name, name)
    corpus = folder_corpus(tmp_path / "mine")
    assert [path.name for path in corpus.files] == ["a.txt", "b.txt", "c.txt"]
    assert corpus.source == "text of the folder mine"
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no \.txt files"):
        folder_corpus(tmp_path / "empty")


@pytest.mark.usefixtures("letters")
def test_folder_is_named_by_its_content(tmp_path):
    mine, home = tmp_path / "My texts", tmp_path / "home"
    write_text(mine / "a.txt", "one", "two")
    write_text(mine / "validation.txt", "three")
    name, folder = prepare_folder_tokens(mine, home, workers=1)
    assert name.startswith("My-texts-")
    assert folder == home / "tokens" / name == require_tokens(name, home)
    assert dataclasses.replace(wikitext103("adam"), text=name).text == name
    assert decode(folder) == [["one", "two"], ["three"]]
    (mine / "a.txt").rename(mine / "b.txt")
    assert prepare_folder_tokens(mine, home, workers=1) == (name, folder)
    write_text(mine / "validation.txt", "four")
    other, _ = prepare_folder_tokens(mine, home, workers=1)
    (mine / "validation.txt").unlink()
    write_text(mine / "b.txt", "one", "page 1016")  # whose sha256 begins below 0.5%
    third, place = prepare_folder_tokens(mine, home, workers=1)
    assert decode(place) == [["one"], ["page 1016"]]
    assert len({name, other, third}) == 3
    assert json.loads((folder / "manifest.json").read_text())["validation"]["tokens"] == 6


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "one", "b": "two"},
            r"nothing to validate on: none of its documents is among the 0\.5% .*validation\.txt",
        ),
        ({"a": "one", "validation": " \n"}, r"nothing to validate on: validation\.txt is blank; put .*validation\.txt"),
        ({"a": "page 1016"}, "mine has nothing to train on: its text is blank, or held out"),
        ({"a": "\n", "validation": "two"}, "nothing to train on"),
    ],
    ids=["few", "blank validation", "all held out", "blank"],
)
def test_folder_with_an_empty_split_is_refused_before_it_is_tokenized(tmp_path, monkeypatch, files, message):
    for name, content in files.items():
        write_text(tmp_path / "mine" / f"{name}.txt", content)
    monkeypatch.setattr(prepare, "_write_shard", None)
    with pytest.raises(ValueError, match=message):
        prepare_folder_tokens(tmp_path / "mine", tmp_path / "home", workers=1)
    assert not (tmp_path / "home").exists()
