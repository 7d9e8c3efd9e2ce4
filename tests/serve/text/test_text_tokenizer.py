"""Tokenizers of every form: the ids of the libraries they stand for, and control tokens only where they are meant."""

import json
import subprocess
import sys
import threading
import time

import gguf
import pytest
import sentencepiece
import tokenizers
from text_samples import SPECIAL, TAGS, bpe_as_gguf, mixed_lines

from modeling.loading.gguf import read_metadata
from serve.text import find_tokenizer, load_tokenizer, read_generation_config
from serve.text.gguf_metadata import from_metadata


def test_tk11_gguf_and_json_give_the_same_ids(bpe_gguf, tokenizer, lines):
    from_gguf = load_tokenizer(bpe_gguf)
    assert len(lines) == 1000
    assert any(tokenizer.encode(line) != tokenizer.encode(line, parse_special=True) for line in lines)
    for line in lines:
        assert from_gguf.encode(line) == tokenizer.encode(line)
        assert from_gguf.encode(line, parse_special=True) == tokenizer.encode(line, parse_special=True)
    assert from_gguf.special_tokens == tokenizer.special_tokens
    assert from_gguf.skipped_ids == tokenizer.skipped_ids
    assert from_gguf.vocab_size == tokenizer.vocab_size
    assert from_gguf.chat_template == tokenizer.chat_template
    assert from_gguf.eos_token_ids == tokenizer.eos_token_ids[:2]  # the file names eos and eot


def test_control_tokens_are_those_of_the_tokenizers_library(bpe_spec, tokenizer, lines):
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec))
    for line in lines:
        assert tokenizer.encode(line, parse_special=True) == library.encode(line, add_special_tokens=False).ids


def test_ordinary_text_has_the_ids_of_the_tokenizers_library(bpe_spec, tokenizer):
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec))
    for line in mixed_lines(300, seed=2, controls=False):
        assert tokenizer.encode(line) == library.encode(line, add_special_tokens=False).ids


@pytest.mark.parametrize("form", ["bpe_folder", "bpe_gguf", "sentencepiece_folder", "sentencepiece_gguf"])
def test_tk03_control_strings_in_text_are_text(form, request, lines):
    tokenizer = load_tokenizer(request.getfixturevalue(form))
    for line in [*lines[:200], *SPECIAL, *TAGS, "".join(SPECIAL + TAGS)]:
        ids = tokenizer.encode(line)
        assert not set(ids) & set(tokenizer.special_tokens)
        assert tokenizer.decode(ids, skip_special_tokens=False) == line
    for text in SPECIAL + TAGS:
        assert tokenizer.encode(text, parse_special=True) == [tokenizer.token_to_id(text)]


def test_tk03_not_even_a_word_rule_that_ignores_merges_finds_them(bpe_spec, tmp_path):
    """With `ignore_merges` a whole word that is in the vocabulary becomes that token."""
    model = bpe_spec["model"] | {"ignore_merges": True, "vocab": bpe_spec["model"]["vocab"] | {"[MASK]": 508}}
    added = [token for token in bpe_spec["added_tokens"] if token["content"] == "[MASK]"]
    spec = bpe_spec | {"model": model, "added_tokens": [added[0] | {"id": 508}], "pre_tokenizer": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("[MASK]", parse_special=True) == [508]
    assert 508 not in tokenizer.encode("[MASK]")


def test_tk03_merges_that_would_spell_a_control_token_are_ignored(bpe_spec, tmp_path):
    vocab = {**bpe_spec["model"]["vocab"]}
    for token in ("[M", "[MA"):
        vocab[token] = max(vocab.values()) + 1
    vocab["[MA]"] = max(vocab.values()) + 1
    model = bpe_spec["model"] | {"vocab": vocab, "merges": [["[", "M"], ["[M", "A"], ["[MA", "]"]]}
    added = {"id": vocab["[MA]"], "content": "[MA]", "special": True, "normalized": False}
    added |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    (tmp_path / "tokenizer.json").write_text(
        json.dumps(bpe_spec | {"model": model, "added_tokens": [added], "pre_tokenizer": None})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("[MA]", parse_special=True) == [vocab["[MA]"]]
    assert tokenizer.encode("[MA]") == [vocab["[MA"], vocab["]"]]


def test_white_space_around_a_control_token_is_swallowed_where_the_checkpoint_says_so(bpe_spec, tmp_path):
    added = [
        token | {"lstrip": token["content"] == "<|user|>", "rstrip": token["content"] == "<|user|>"}
        for token in bpe_spec["added_tokens"]
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec | {"added_tokens": added}))
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec | {"added_tokens": added}))
    text = "the \n<|user|>  quick <think> brown"
    ids = load_tokenizer(tmp_path).encode(text, parse_special=True)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert ids != load_tokenizer(tmp_path).encode(text.replace("  quick", "quick "), parse_special=True)


def test_the_longest_control_token_is_meant_and_whole_words_where_asked_for(bpe_spec, tmp_path):
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False}
    texts = {"<a>": False, "<a>b": False, "stop": True}
    start = len(bpe_spec["model"]["vocab"])
    added = [flags | {"id": start + i, "content": t, "single_word": w} for i, (t, w) in enumerate(texts.items())]
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec | {"added_tokens": added}))
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec | {"added_tokens": added}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<a>b<a>", parse_special=True) == [start + 1, start]
    for text in ("<a>b<a>", "stop", "a stop!", "nonstop", "stops"):
        assert tokenizer.encode(text, parse_special=True) == library.encode(text, add_special_tokens=False).ids


def test_only_the_first_word_of_a_prompt_gets_a_space(tmp_path):
    """Metaspace with "first" looks at the position in the whole text, not in the piece between control tokens."""
    vocab = {"<unk>": 0, "\u2581a": 1, "a": 2, "\u2581": 3, "<s>": 4}
    library = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", fuse_unk=True)
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    library.add_special_tokens(["<unk>", "<s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for text, expected in (("a", [1]), ("a<s>a", [1, 4, 2]), ("<s>a a", [4, 2, 1])):
        assert tokenizer.encode(text, parse_special=True) == expected
        assert library.encode(text, add_special_tokens=False).ids == expected
        assert tokenizer.decode(expected, skip_special_tokens=False) == text


def test_decode_is_that_of_the_tokenizers_library(bpe_spec, tokenizer, lines):
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec))
    for line in lines[:300]:
        ids = tokenizer.encode(line, parse_special=True)
        assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=True)
        assert tokenizer.decode(ids, skip_special_tokens=False) == line
        # Cut anywhere, so that characters break.
        assert tokenizer.decode(ids[1:-1]) == library.decode(ids[1:-1], skip_special_tokens=True)


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, -1]) == ""


def test_ordinary_sentencepiece_ids_are_the_librarys(sentencepiece_folder):
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    tokenizer = load_tokenizer(sentencepiece_folder)
    for line in mixed_lines(300, seed=3, controls=False):
        if "<think" not in line:
            assert tokenizer.encode(line) == library.encode(line)
            assert tokenizer.decode(library.encode(line)) == library.decode(library.encode(line))


def test_tk11_sentencepiece_and_gguf_give_the_same_ids(sentencepiece_folder, sentencepiece_gguf, lines):
    from_model, from_gguf = load_tokenizer(sentencepiece_folder), load_tokenizer(sentencepiece_gguf)
    for line in lines:
        assert from_gguf.encode(line) == from_model.encode(line)
        assert from_gguf.encode(line, parse_special=True) == from_model.encode(line, parse_special=True)
    assert from_gguf.special_tokens == from_model.special_tokens


def test_sentencepiece_takes_added_tokens_from_its_settings(sentencepiece_folder, tmp_path):
    base = load_tokenizer(sentencepiece_folder)
    (tmp_path / "tokenizer.model").write_bytes((sentencepiece_folder / "tokenizer.model").read_bytes())
    added = {str(base.vocab_size): {"content": "<|extra|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == base.vocab_size + 1
    assert tokenizer.encode("<|extra|>", parse_special=True) == [base.vocab_size]
    assert tokenizer.decode([base.vocab_size], skip_special_tokens=False) == "<|extra|>"


@pytest.mark.parametrize("pre", ["gpt2", "gpt-2", "llama-bpe", "qwen2", "glm4", "chatglm-bpe", "default"])
def test_known_word_rules_load_and_round_trip(bpe_spec, tmp_path, pre):
    tokenizer = load_tokenizer(bpe_as_gguf(bpe_spec, tmp_path / "model.gguf", pre))
    for line in mixed_lines(50, seed=4):
        text = line.replace("e\u0301", "")  # qwen2 composes characters
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_word_rules_differ_where_they_should(bpe_spec, tmp_path):
    """Digits: glm4 takes three at a time, qwen2 one."""
    glm4 = load_tokenizer(bpe_as_gguf(bpe_spec, tmp_path / "a.gguf", "glm4"))
    qwen2 = load_tokenizer(bpe_as_gguf(bpe_spec, tmp_path / "b.gguf", "qwen2"))
    assert len(qwen2.encode("12345")) == 5
    assert len(glm4.encode("12345")) < 5


def test_words_in_the_vocabulary_that_no_merge_reaches(bpe_spec, tmp_path):
    """llama-bpe takes them whole, as Llama 3's own tokenizer.json says; the others spell them out."""
    vocab = bpe_spec["model"]["vocab"]
    spec = bpe_spec | {"model": bpe_spec["model"] | {"vocab": vocab | {"Zq": len(vocab)}}, "added_tokens": []}
    for token in ("<|endoftext|>", "<|user|>"):
        spec["model"]["vocab"][token] = len(spec["model"]["vocab"])
    llama = load_tokenizer(bpe_as_gguf(spec, tmp_path / "a.gguf", "llama-bpe"))
    glm4 = load_tokenizer(bpe_as_gguf(spec, tmp_path / "b.gguf", "glm4"))
    assert llama.encode("Zq") == [len(vocab)]
    assert glm4.encode("Zq") == [vocab["Z"], vocab["q"]]


def test_qwen2_composes_characters(bpe_spec, tmp_path):
    qwen2 = load_tokenizer(bpe_as_gguf(bpe_spec, tmp_path / "model.gguf", "qwen2"))
    assert qwen2.decode(qwen2.encode("e\u0301")) == "\u00e9"


def test_unknown_word_rule_is_refused_by_name(bpe_spec, tmp_path):
    with pytest.raises(ValueError, match=r"'frobnicate-bpe'.*tokenizer\.json"):
        load_tokenizer(bpe_as_gguf(bpe_spec, tmp_path / "model.gguf", "frobnicate-bpe"))


def test_a_tokenizer_json_inside_the_gguf_is_used(bpe_spec, lines):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "unknown", "tokenizer.ggml.tokens": []}
    inside = from_metadata(metadata | {"tokenizer.huggingface.json": json.dumps(bpe_spec)})
    library = tokenizers.Tokenizer.from_str(json.dumps(bpe_spec))
    assert inside.encode(lines[0], parse_special=True) == library.encode(lines[0], add_special_tokens=False).ids


@pytest.mark.parametrize("model", ["rwkv", None])
def test_other_gguf_tokenizers_are_refused(model):
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        from_metadata({} if model is None else {"tokenizer.ggml.model": model})


@pytest.mark.parametrize("damage", ["magic", "cut", "empty", "length"])
def test_damaged_gguf_is_refused(bpe_gguf, tmp_path, damage):
    data = bpe_gguf.read_bytes()
    damaged = {
        "magic": b"GGML" + data[4:],
        "cut": data[:5000],
        "empty": b"",
        "length": data[:24] + b"\xff" * 8 + data[32:],
    }
    (tmp_path / "model.gguf").write_bytes(damaged[damage])
    with pytest.raises(ValueError, match=r"model\.gguf (is|has) "):
        load_tokenizer(tmp_path)


def test_gguf_metadata_is_what_the_gguf_library_reads(bpe_gguf, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "flint")
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "uint64", "int64", "float64"):
        getattr(writer, f"add_{kind}")(f"a.{kind}", 3)
    writer.add_bool("a.bool", True)
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_array("a.strings", ["x", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for file in (tmp_path / "all.gguf", bpe_gguf):
        fields = gguf.GGUFReader(file).fields
        expected = {name: f.contents() for name, f in fields.items() if not name.startswith("GGUF.")}
        nested = expected.pop("a.nested", None) and {"a.nested": [[1, 2], [3]]}  # the library flattens it
        assert read_metadata(file) == expected | (nested or {})


def test_unsupported_decoder_is_refused_by_name(bpe_spec, tmp_path):
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec | {"decoder": decoder}))
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_missing_tokenizer_says_what_to_add(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_tk07_all_end_ids_are_kept(bpe_folder, tokenizer):
    names = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    expected = tuple(tokenizer.token_to_id(name) for name in names)
    assert tokenizer.eos_token_ids == expected
    config = read_generation_config(bpe_folder)
    assert config.eos_token_ids == expected
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (1.0, 0.95, 20, None)
    assert tokenizer.decode([*expected, *tokenizer.encode("fox")]) == "fox"


def test_tk07_a_gguf_may_name_three_end_ids():
    metadata = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot", "eom", "bos"))}
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c", "d"], "tokenizer.ggml.model": "gpt2"}
    assert from_metadata(metadata | tokens).eos_token_ids == (0, 1, 2)


def test_tk07_the_tokenizers_own_end_is_added_to_the_listed_ones(bpe_spec, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (7, tokenizer.token_to_id("<|endoftext|>"))
    assert tokenizer.template_variables == {"eos_token": "<|endoftext|>"}


def test_generation_config_may_be_absent_or_wrong(tmp_path):
    assert read_generation_config(tmp_path).eos_token_ids == ()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["a"]}')
    with pytest.raises(ValueError, match="eos_token_id"):
        read_generation_config(tmp_path)


def test_generation_config_may_ask_for_no_sampling(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.7}')
    assert read_generation_config(tmp_path).temperature == 0.0
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
    assert read_generation_config(tmp_path).temperature == 0.7


def test_the_tokenizer_is_found_and_knows_its_file(bpe_folder, bpe_gguf, tmp_path):
    assert find_tokenizer(bpe_folder) == find_tokenizer(bpe_folder, bpe_gguf) == bpe_folder / "tokenizer.json"
    assert find_tokenizer(tmp_path, bpe_gguf) == find_tokenizer(bpe_gguf) == bpe_gguf
    assert load_tokenizer(bpe_gguf.parent).source == bpe_gguf


def test_where_the_chat_template_comes_from(bpe_folder, bpe_spec, tmp_path):
    assert load_tokenizer(bpe_folder).chat_template == (bpe_folder / "chat_template.jinja").read_text()
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec))
    assert load_tokenizer(tmp_path).chat_template is None
    named = [{"name": "rag", "template": "one"}, {"name": "default", "template": "two"}]
    for stated, expected in (("text", "text"), (named, "two"), (named[:1], "one")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
        assert load_tokenizer(tmp_path).chat_template == expected


def test_prefix_ids_come_from_the_post_processor(bpe_spec, tmp_path):
    bos = next(token["id"] for token in bpe_spec["added_tokens"] if token["content"] == "<sop>")
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<sop>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<sop>": {"id": "<sop>", "ids": [bos], "tokens": ["<sop>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec | {"post_processor": processor}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.prefix_ids == (bos,)
    assert bos not in tokenizer.encode("the fox")


def test_no_module_of_the_package_imports_jax():
    names = "glm47, tool_arguments, huggingface, spm, gguf_metadata, chat_template, stop, detokenize"
    code = f"import sys; from serve.text import {names}; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_longest_token(tokenizer):
    assert tokenizer.max_token_bytes == max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
    assert tokenizer.max_token_bytes >= max(map(len, SPECIAL))


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer):
    text, done, longest = "abc def " * 60_000, threading.Event(), 0.0
    thread = threading.Thread(target=lambda: (tokenizer.encode(text), done.set()))
    started = last = time.perf_counter()
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    thread.join()
    assert longest < 0.6 * (last - started)
    assert tokenizer.encode(text)[:8] == tokenizer.encode(text[:64])[:8]


def damaged(spec, **changes):
    return json.dumps(spec | changes)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", lambda spec: "[]", "must hold a JSON object, not a list"),
        ("tokenizer.json", lambda spec: "{", "no valid JSON"),
        ("tokenizer.json", lambda spec: b"\xff{}", "cannot be read"),
        ("tokenizer.json", lambda spec: json.dumps({k: v for k, v in spec.items() if k != "model"}), "lacks 'model'"),
        ("tokenizer.json", lambda spec: damaged(spec, model=5), ""),
        ("tokenizer.json", lambda spec: damaged(spec, model=spec["model"] | {"vocab": {"a": "b"}}), ""),
        ("tokenizer.json", lambda spec: damaged(spec, model=spec["model"] | {"merges": [["q", "nowhere"]]}), ""),
        ("tokenizer.json", lambda spec: damaged(spec, added_tokens=[{"content": "<x>"}]), "lacks 'id'"),
        ("tokenizer.json", lambda spec: damaged(spec, decoder=[]), ""),
        ("tokenizer_config.json", lambda spec: "[]", "must hold a JSON object"),
        ("tokenizer_config.json", lambda spec: '{"eos_token": 5}', "eos_token must be a string"),
        ("tokenizer_config.json", lambda spec: '{"chat_template": 5}', "chat_template must be"),
        ("tokenizer_config.json", lambda spec: '{"chat_template": [{}]}', "chat_template must be"),
        ("tokenizer_config.json", lambda spec: '{"chat_template": "{% for %}"}', "no valid Jinja"),
        ("tokenizer_config.json", lambda spec: '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder must"),
        ("special_tokens_map.json", lambda spec: '{"eos_token": [5]}', "eos_token must be a string"),
        ("generation_config.json", lambda spec: "[]", "must hold a JSON object"),
        ("generation_config.json", lambda spec: "[" * 100_000, "no valid JSON"),
        ("chat_template.jinja", lambda spec: "{% for %}", "line 1"),
        ("chat_template.jinja", lambda spec: "{{ a | no_such_filter }}", "no valid Jinja"),
        ("chat_template.jinja", lambda spec: "{{ " + "(" * 5000 + "}}", "cannot be compiled"),
        ("chat_template.jinja", lambda spec: b"\xff", "cannot be read"),
    ],
)
def test_a_damaged_file_is_named(bpe_spec, tmp_path, name, content, says):
    (tmp_path / "tokenizer.json").write_text(json.dumps(bpe_spec))
    content = content(bpe_spec)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"cannot be used (as a|with the) tokenizer: .") as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / name)) and says in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("x.model", b"\xff\xfe"), ("x.model", b""), ("x.gguf", b"GGUF")])
def test_a_damaged_vocabulary_of_another_form_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be used as a tokenizer: ."):
        load_tokenizer(tmp_path)
