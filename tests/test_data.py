"""Training rows: where the answer begins, what a bad line says, and shards that a second run continues."""

import json
import multiprocessing
from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selfspec.exit_module import ExitConfig
from selfspec.files import locked, read_jsonl
from selfspec.model import EarlyExitModel
from selfspec.pretrained import load_target_model
from selfspec.target import Target
from selfspec.training import batch, generate_data, kept_states
from selfspec.training.batch import sample, write_batch
from selfspec.training.config import DataConfig, TrainConfig
from selfspec.training.data import Row, load_shards, prompt_ids, read_prompts, rows_from_jsonl, write_shard
from selfspec.training.generate_data import write_data
from selfspec.training.kept_states import KeptStates, collect_cached
from selfspec.training.on_disk import load
from selfspec.training.run import train_exits
from selfspec.training.states import collect, kept_depths
from selfspec.training.workers import num_workers_for
from tests.conftest import build_model, byte_tokenizer, prompt_of

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
EOS = 1


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(CHATML)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=EOS, bos_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    return made


@pytest.fixture
def prompts_file(tmp_path):
    records = [{"prompt": "x" * (1 + i % 7) + chr(60 + i), "category": "ab"[i % 3 == 0]} for i in range(60)]
    return write_jsonl(tmp_path / "prompts.jsonl", *records)


def write_jsonl(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def answer(row, tokenizer):
    return tokenizer.decode(row.ids[row.answer_start :])


def generate(model, tokenizer, folder, num_tokens, **changes):
    settings = {"batch_size": 4, "max_new_tokens": 6, "shard_tokens": 40, "seed": 3} | changes
    return write_data(model, tokenizer, folder, num_tokens, **settings)


def write(model, prompts, max_new_tokens, eos_ids=()):
    """Greedy answers."""
    return write_batch(Target(model), prompts, torch.zeros(len(prompts)), max_new_tokens, torch.Generator(), eos_ids)


def same(a, b):
    pairs = zip(a, b, strict=True)
    return all(np.array_equal(x.ids, y.ids) and x.answer_start == y.answer_start for x, y in pairs)


# Reading what people have


def test_only_the_last_answer_and_its_end_token_carry_the_loss(tmp_path, tokenizer):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "dé")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path = write_jsonl(tmp_path / "x", {"messages": messages}, {"prompt": "p", "completion": "q"}, {"text": "tt"})
    chat, pair, text = rows_from_jsonl(path, tokenizer)
    assert answer(chat, tokenizer) == "dé</s>"
    assert tokenizer.decode(chat.ids[: chat.answer_start]).endswith("c</s>\n<s>assistant\n")
    assert answer(pair, tokenizer) == "q</s>"
    assert answer(text, tokenizer) == "tt"


def test_without_a_chat_template_texts_are_joined_plainly(tmp_path, tokenizer):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, bos_token="<s>", eos_token="</s>")
    (row,) = rows_from_jsonl(write_jsonl(tmp_path / "x", {"prompt": "p", "completion": "q"}), plain)
    assert plain.decode(row.ids) == "<s>pq</s>"
    assert answer(row, plain) == "q</s>"


def test_a_template_that_rewrites_earlier_turns_is_refused_not_masked_wrongly(tmp_path, tokenizer):
    odd = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="</s>")
    odd.chat_template = "{{ messages | length }}" + CHATML
    path = write_jsonl(tmp_path / "x", {"prompt": "p", "completion": "q"})
    with pytest.raises(ValueError, match=r"x:1: the chat template rewrites earlier turns"):
        rows_from_jsonl(path, odd)


def test_empty_and_over_long_answers_are_counted(tmp_path, tokenizer):
    answers = ["ok", "", " \n", "long" * 50]
    path = write_jsonl(tmp_path / "x", *({"prompt": "p", "completion": text} for text in answers))
    skipped = Counter()
    assert len(rows_from_jsonl(path, tokenizer, max_tokens=100, skipped=skipped)) == 1
    assert skipped == {"empty answer": 2, "over 100 tokens": 1}
    with pytest.raises(ValueError, match="no usable rows"):
        rows_from_jsonl(path, tokenizer, max_tokens=2)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "bad JSON"),
        (b'{"prompt": "\xff"}', r"not UTF-8 \(byte 12"),
        (b"[1]", "expected an object, got list"),
        (b'{"question": "x"}', r"needs a string `text`, has \['question'\]"),
        (b'{"prompt": "x"}', "needs a string `completion`"),
        (b'{"messages": [{"role": "assistant"}]}', "message 0 has no string `content`"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "must end in an assistant turn"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer, line, says):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"data\.jsonl:3: .*{says}"):
        rows_from_jsonl(path, tokenizer)


def test_prompts_come_from_any_field_and_lose_their_last_answer(tmp_path):
    chat = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    path = write_jsonl(tmp_path / "x", {"prompt": "a", "category": "k"}, {"text": "b"}, {"messages": chat})
    prompts = read_prompts(path)
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["a", "b", "c"]
    assert prompts[0].category == "k"
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(write_jsonl(tmp_path / "y"))
    assert not list(read_jsonl(tmp_path / "y"))


# Shards


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_the_vocabulary_chooses_the_width_of_an_id(tmp_path, vocab_size, dtype):
    from safetensors.numpy import load_file

    write_shard(tmp_path / "s", [Row(np.array([1, 65535]), 1)], vocab_size)
    assert load_file(tmp_path / "s")["tokens"].dtype == dtype


def test_a_flipped_bit_and_a_missing_shard_are_found(tmp_path, model, tokenizer, prompts_file):
    manifest = generate(model, tokenizer, tmp_path / "d", 30, prompts=prompts_file)
    path = tmp_path / "d" / manifest["shards"][0]["file"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"shard-00000\.safetensors: sha256 differs"):
        load_shards(tmp_path / "d")
    path.unlink()
    with pytest.raises(ValueError, match="missing"):
        load_shards(tmp_path / "d")
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        load_shards(tmp_path)


# Generating


APART = [[5, 6, 7], [9], [20, 21, 22, 23, 24], [30, 31]]  # nothing in common
ALIKE = [prompt_of(size, seed=0)[:6] + prompt_of(size, seed=size)[6:] for size in (50, 7, 23, 39, 24)]
EQUAL = [prompt_of(20)] * 3


@pytest.mark.parametrize(
    "prompts", [APART, ALIKE, EQUAL, ALIKE[:1], [[5], [6]]], ids=["apart", "alike", "equal", "single", "tokens"]
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])  # plain, with a sliding window, learnt positions
def test_padded_greedy_answers_are_those_of_each_prompt_alone(family, prompts):
    """Whatever prompts have in common, and however many chunks they are read in."""
    model = build_model(family, seed=1)
    for prompt, found in zip(prompts, write(model, prompts, 12, [EOS]), strict=True):
        alone = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=EOS, eos_token_id=EOS
        )
        assert found.answer == alone[0, len(prompt) :].tolist()


def test_what_prompts_begin_with_is_run_once(model, monkeypatch):
    """Tokens that pass the target: those of the shared start once, of the rest hardly any padding."""
    counts, run = [], batch._Notes.run
    monkeypatch.setattr(batch._Notes, "run", lambda *a: counts.append(a[1].numel()) or run(*a))
    prompts = [prompt_of(20) + prompt_of(size, seed=size) for size in (90, 10, 30)]
    write(model, prompts, 1)
    assert counts[0] == 20
    assert 130 <= sum(counts[1:]) <= 130 + 2 * batch.CHUNK


def test_rows_that_end_leave_and_the_others_go_on_unchanged(model):
    """Each greedy answer, cut at its first end token, whatever ends beside it."""
    prompts = [[5, 6, 7], [9], [20, 21, 22, 23, 24], [30, 31]]
    whole = [written.answer for written in write(model, prompts, 12)]
    ends = {whole[0][2], whole[2][6]}
    for found, full in zip(write(model, prompts, 12, sorted(ends)), whole, strict=True):
        cut = next((i + 1 for i, token in enumerate(full) if token in ends), 12)
        assert found.answer == full[:cut]


def test_states_kept_while_writing_are_those_of_a_pass_over_the_rows(tmp_path, model, tokenizer, prompts_file):
    target, config = Target(model), ExitConfig(exit_layer=1, recall_layers=(1, 2))
    kept, depths = KeptStates(tmp_path / "states", "this model"), kept_depths(target.num_layers, config)
    generate(model, tokenizer, tmp_path / "data", 60, prompts=prompts_file, kept=kept, depths=depths)
    rows = load_shards(tmp_path / "data")
    for row, held, made in zip(rows, kept.find(rows, depths), collect(target, config, rows), strict=True):
        found = held.for_exit(config, row)
        assert found.answer_start == made.answer_start
        assert found.taps.shape == made.taps.shape == (len(row.ids) - 1, 32)
        for name in ("taps", "recalls", "wanted", "finals", "log_sums"):
            torch.testing.assert_close(load(getattr(found, name)), getattr(made, name), rtol=2e-2, atol=1e-3)
        assert torch.equal(found.argmaxes, made.argmaxes)
        if row.temperature == 0:
            assert found.argmaxes.tolist() == row.ids[row.answer_start :].tolist()
    assert not any(held.by_depth for held in KeptStates(tmp_path / "states", "another model").find(rows, depths))


def test_draws_follow_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).repeat(20_000, 1)
    temperatures = torch.full((20_000,), 0.8)
    drawn = sample(logits, temperatures, torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    torch.testing.assert_close(drawn, (logits[0] / 0.8).softmax(-1), atol=0.012, rtol=0)  # 3.5 sigma
    assert sample(logits[:1], torch.zeros(1), torch.Generator()).item() == 2


@pytest.mark.parametrize("kind", ["prompts", "self"])
def test_a_run_in_two_parts_writes_the_rows_of_one_run(tmp_path, model, tokenizer, prompts_file, kind, monkeypatch):
    if kind == "self":  # a random model needs many end tokens to end a user's turn soon
        monkeypatch.setattr(generate_data, "eos_ids", lambda _: list(range(1, 60)))
    prompts = {"prompts": prompts_file if kind == "prompts" else None}
    generate(model, tokenizer, tmp_path / "whole", 120, **prompts)
    generate(model, tokenizer, tmp_path / "parts", 30, **prompts)
    manifest = generate(model, tokenizer, tmp_path / "parts", 120, **prompts)
    rows = load_shards(tmp_path / "parts")
    assert same(rows, load_shards(tmp_path / "whole"))
    assert manifest["num_answer_tokens"] == sum(row.num_answer_tokens for row in rows) >= 120
    assert {row.temperature for row in rows} == {0.0, float(np.float32(0.8))}
    if kind == "prompts":
        start = prompt_ids(tokenizer, [{"role": "user", "content": "x"}])
        assert all(row.ids[: row.answer_start].tolist()[:5] == start[:5] for row in rows)


def test_other_settings_do_not_mix_into_a_folder(tmp_path, model, tokenizer, prompts_file):
    generate(model, tokenizer, tmp_path / "d", 10, prompts=prompts_file)
    with pytest.raises(ValueError, match=r"other settings \(seed: 3 -> 4\)"):
        generate(model, tokenizer, tmp_path / "d", 20, prompts=prompts_file, seed=4)


def test_two_writers_do_not_share_a_folder(tmp_path, model, tokenizer, prompts_file):
    with locked(tmp_path / "d"), pytest.raises(BlockingIOError, match="another process"):
        generate(model, tokenizer, tmp_path / "d", 10, prompts=prompts_file)


def test_a_model_that_never_answers_is_given_up(tmp_path, model, tokenizer, monkeypatch):
    monkeypatch.setattr(generate_data, "eos_ids", lambda _: list(range(len(tokenizer))))
    with pytest.raises(ValueError, match="wrote no answer in 16 batches"):
        generate(model, tokenizer, tmp_path / "d", 10)
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        load_shards(tmp_path / "d")


def test_when_prompts_run_out_what_there_is_is_kept(tmp_path, model, tokenizer):
    path = write_jsonl(tmp_path / "p", {"prompt": "a"}, {"prompt": "b" * 900})
    manifest = generate(model, tokenizer, tmp_path / "d", 10_000, prompts=path)
    assert manifest["num_rows"] == len(load_shards(tmp_path / "d")) == 1
    assert manifest["skipped"] == {"over-long prompt": 1}


def test_every_prefix_of_the_plan_keeps_the_share_of_each_category(tokenizer, prompts_file):
    prompts = read_prompts(prompts_file)
    by_length = {len(prompt_ids(tokenizer, p.messages)): None for p in prompts}
    plan = generate_data._plan(prompts, tokenizer, 4, 512, 0, Counter())
    assert sum(map(len, plan)) == 60
    assert {len(ids) for batch in plan for ids in batch} == set(by_length)
    assert plan == generate_data._plan(prompts, tokenizer, 4, 512, 0, Counter())
    order = generate_data._stratified([p.category for p in prompts], np.random.default_rng(0))
    assert sorted(order) == list(range(60))
    for size in (9, 30, 45):
        assert abs(sum(prompts[i].category == "b" for i in order[:size]) - size / 3) <= 1


def test_a_whole_run_writes_learns_and_saves_without_a_second_pass(
    tmp_path, model, tokenizer, prompts_file, monkeypatch
):
    """From prompts to an exit that loads and decodes; the states were kept while the rows were written."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = TrainConfig(
        model=str(tmp_path / "model"), recall_layers=(1, 2), num_steps=1, draft_vocab_size=None, lora_rank=2,
        data=DataConfig(num_tokens=300, prompts=str(prompts_file)), output=str(tmp_path / "run"), max_steps=2,
        eval_fraction=0.3,
    )  # fmt: skip
    with locked(tmp_path / "run"), pytest.raises(BlockingIOError, match="another process"):
        train_exits(config)
    monkeypatch.setattr(kept_states, "teach", lambda *_: pytest.fail("a second pass over the rows"))
    saved = train_exits(config)
    decoder = EarlyExitModel.from_pretrained(tmp_path / "model", exits=str(saved))
    ids = torch.tensor([prompt_ids(tokenizer, [{"role": "user", "content": "x"}])])
    drafted = decoder.generate(ids, max_new_tokens=20, draft="chain")
    assert drafted.stats.num_drafted > 0
    assert torch.equal(drafted.sequences, decoder.generate(ids, max_new_tokens=20, draft="off").sequences)


@pytest.mark.slow
def test_two_processes_write_what_one_would(tmp_path, model, tokenizer):
    """Same rows in the same order, same teacher states; nobody is left behind of what ran ahead of the last batch."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    held, tokenizer = load_target_model(tmp_path / "model", dtype="float32", device="cpu")
    assert num_workers_for(held, 2) == 2
    assert num_workers_for(model, 2) == 1  # nowhere to load it from
    rows = {}
    for count in (1, 2):
        generate(held, tokenizer, tmp_path / f"data{count}", 200, num_workers=count)
        rows[count] = load_shards(tmp_path / f"data{count}")
    assert [row.ids.tolist() for row in rows[1]] == [row.ids.tolist() for row in rows[2]]
    target, config = Target(held), ExitConfig(exit_layer=1, recall_layers=(1,))
    one = collect_cached(target, KeptStates(tmp_path / "s1", "t"), config, rows[1], 8)
    two = collect_cached(target, KeptStates(tmp_path / "s2", "t"), config, rows[1], 8, num_workers=2)
    assert all(torch.equal(load(a.finals), load(b.finals)) for a, b in zip(one, two, strict=True))
    for child in multiprocessing.active_children():
        child.join(timeout=30)
    assert not multiprocessing.active_children()
