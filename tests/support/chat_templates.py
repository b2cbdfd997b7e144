"""Chat templates as those of well-known models behave, written from their documentation, and what a
model learns of an answer with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHATML_TURN = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
CHATML_ASK = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
ALTERNATE = (
    "{%- for m in turns %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}{%- endfor %}"
)
SPLIT_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}"
    "{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}"
    "{%- set turns = messages %}{%- endif %}"
)

CHATML = "{%- for m in messages %}" + CHATML_TURN + "{%- endfor %}" + CHATML_ASK
CHATML_WITHOUT_ASKING = "{%- for m in messages %}" + CHATML_TURN + "{%- endfor %}"
SMOLLM2 = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}" + CHATML
)
LLAMA2 = (
    SPLIT_SYSTEM
    + ALTERNATE
    + "{%- for m in turns %}{%- if m.role == 'user' %}{{- bos_token + '[INST] ' }}"
    "{%- if loop.first and system %}{{- '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' }}{%- endif %}"
    "{{- m.content | trim + ' [/INST]' }}"
    "{%- else %}{{- ' ' + m.content | trim + ' ' + eos_token }}{%- endif %}{%- endfor %}"
)
LLAMA3 = (
    "{%- for m in messages %}{%- if loop.first %}{{- bos_token }}{%- endif %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}"
    "{%- if m.tool_calls is defined %}{{- m.tool_calls[0].function | tojson + '<|eom_id|>' }}"
    "{%- else %}{{- m.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL1 = (
    "{%- set turns = messages %}{{- bos_token }}"
    + ALTERNATE
    + "{%- for m in turns %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}"
    "{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL3 = (
    SPLIT_SYSTEM
    + ALTERNATE
    + "{{- bos_token }}{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in turns %}{%- if m.role == 'user' %}{{- '[INST] ' }}"
    "{%- if system and m is sameas users[-1] %}{{- system + '\\n\\n' }}{%- endif %}"
    "{{- m.content + '[/INST]' }}"
    "{%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}{%- endfor %}"
)
MISTRAL7 = (
    "{{- bos_token }}{%- for m in messages %}"
    "{%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}"
    "{%- elif m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"
)
QWEN25 = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}"
    "{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    "{%- elif messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}"
    "{%- endif %}{%- else %}{{- '<|im_start|>' + m.role }}"
    "{%- if m.content %}{{- '\\n' + m.content }}"
    "{%- elif not m.tool_calls %}{{- '\\n' }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}" + CHATML_ASK
)
QWEN3 = (
    "{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + content.lstrip('\\n') }}"
    "{%- else %}{{- content }}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- else %}" + CHATML_TURN + "{%- endif %}{%- endfor %}" + CHATML_ASK
)
GEMMA2 = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}"
    "{{- raise_exception('System role not supported') }}{%- endif %}{%- set turns = messages %}"
    + ALTERNATE
    + "{%- for m in turns %}{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\\n' + m.content | trim + '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
GEMMA3 = (
    SPLIT_SYSTEM + ALTERNATE + "{{- bos_token }}{%- for m in turns %}"
    "{%- set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{- '<start_of_turn>' + role + '\\n' }}"
    "{%- if loop.first and system %}{{- system + '\\n\\n' }}{%- endif %}"
    "{%- if m.content is string %}{{- m.content | trim }}{%- else %}"
    "{%- for part in m.content %}{{- part.text | trim }}{%- endfor %}{%- endif %}"
    "{{- '<end_of_turn>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"
)
PHI3 = (
    "{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}"
    "{%- else %}{{- eos_token }}{%- endif %}"
)
PHI4 = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"
)
DEEPSEEK_R1 = (
    "{{- bos_token }}{%- for m in messages if m.role == 'system' %}{{- m.content }}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}"
    "{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] }}"
    "{{- '<｜end▁of▁sentence｜>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)
ZEPHYR = (
    "{% for m in messages %}\n{{ '<|' + m.role + '|>\\n' + m.content + eos_token }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
COMMAND_R = (
    "{{- bos_token }}{%- for m in messages %}{{- '<|START_OF_TURN_TOKEN|>' }}"
    "{{- {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>',"
    " 'system': '<|SYSTEM_TOKEN|>'}[m.role] + m.content | trim + '<|END_OF_TURN_TOKEN|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}"
    "{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
)
MARKED = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}{%- if m.role == 'assistant' %}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}" + CHATML_ASK
)


def as_it_is(content: str) -> str:
    return content


def after_thinking(content: str) -> str:
    return content.split("</think>")[-1]


def thinking_anew(content: str) -> str:
    """Qwen3's last answer."""
    thought = content.split("</think>")[0].split("<think>")[-1] if "</think>" in content else ""
    answer = after_thinking(content).lstrip("\n")
    return "<think>\n" + thought.strip("\n") + "\n</think>\n\n" + answer


def thought_before(content: str) -> str:
    """Qwen3's earlier answers."""
    return after_thinking(content).lstrip("\n") if "</think>" in content else content


@dataclass(frozen=True)
class Style:
    """A template, and what of an answer is learnt with it.

    Attributes:
        template: The template.
        end: What ends an answer.
        written: What an answer becomes.
        last_end: What ends the last answer, if that is something else.
        last: What the last answer becomes, if that is something else.
        refuses: Roles that it does not take.
    """

    template: str
    end: str
    written: Callable[[str], str] = as_it_is
    last_end: str | None = None
    last: Callable[[str], str] | None = None
    refuses: tuple[str, ...] = ()

    def learnt(self, messages: list[dict[str, Any]]) -> list[str]:
        """The answers, each with what ends it."""
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        found = [self.written(answer) + self.end for answer in answers]
        if messages[-1]["role"] == "assistant":
            end = self.end if self.last_end is None else self.last_end
            found[-1] = (self.last or self.written)(answers[-1]) + end
        return found


STYLES = {
    "ChatML": Style(CHATML, "<|im_end|>\n"),
    "ChatML without asking": Style(CHATML_WITHOUT_ASKING, "<|im_end|>\n"),
    "SmolLM2": Style(SMOLLM2, "<|im_end|>\n"),
    "Llama 2": Style(LLAMA2, " </s>", str.strip),
    "Llama 3": Style(LLAMA3, "<|eot_id|>", str.strip),
    "Mistral 1": Style(MISTRAL1, "</s>", refuses=("system",)),
    "Mistral 3": Style(MISTRAL3, "</s>", str.strip),
    "Mistral 7": Style(MISTRAL7, "</s>"),
    "Qwen 2.5": Style(QWEN25, "<|im_end|>\n"),
    "Qwen 3": Style(QWEN3, "<|im_end|>\n", thought_before, last=thinking_anew),
    "Gemma 2": Style(GEMMA2, "<end_of_turn>\n", str.strip, refuses=("system",)),
    "Gemma 3": Style(GEMMA3, "<end_of_turn>\n", str.strip),
    "Phi 3": Style(PHI3, "<|end|>\n", last_end="<|end|>\n</s>"),
    "Phi 4": Style(PHI4, "<|im_end|>"),
    "DeepSeek-R1": Style(DEEPSEEK_R1, "<｜end▁of▁sentence｜>", after_thinking),
    "Zephyr": Style(ZEPHYR, "</s>\n"),
    "Command-R": Style(COMMAND_R, "<|END_OF_TURN_TOKEN|>", str.strip),
    "marked": Style(MARKED, "<|im_end|>"),
}


def turns(*contents: str, system: str = "") -> list[dict[str, Any]]:
    """A conversation of a user and an assistant, who speak in turn."""
    roles = ("user", "assistant") * len(contents)
    first = [{"role": "system", "content": system}] if system else []
    return first + [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


SHORT = (
    "a",
    "is",
    "s",
    "\n",
    "",
    " hi ",
    "assistant",
    "model",
    "end",
    "INST",
    "im_",
    "|",
    "\n\nx\n",
)
"""Answers that templates have among their own words, or trim."""
CONVERSATIONS = {
    "one turn": turns("What is 2 + 2?", "Four."),
    "three turns": turns("2 + 2?", "Four.", "And 3 + 3?", "Six, überdies.", "So?", "So it is."),
    "system": turns("2 + 2?", "Four.", "3 + 3?", "Six.", system="Be brief."),
    "thinking": turns(
        "2 + 2?", "<think>\nhm\n</think>\n\nFour.", "3?", "<think>\nOh.\n</think>\n\nSix."
    ),
    "open": turns("2 + 2?", "Four.", "And 3 + 3?"),
    "same words": turns("Four.", "Four.", "Four.", "Four."),
    **{repr(word): turns("Which?", word, word, word) for word in SHORT},
}
