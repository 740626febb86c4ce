"""Chat templates written for tests, each in the manner of a model family or for one feature of Jinja."""

# ruff: noqa: E501 (a line end is text in a template)

from __future__ import annotations

CHAT_TEMPLATES: dict[str, str] = {
    "chatml": r"""{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "qwen tools": r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be of use.' }}{%- endif %}
    {{- "\n\n# Functions\n<functions>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</functions><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<response>\n' ~ message.content ~ '\n</response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
    "qwen thinking": r"""{%- set ns = namespace(multi_step=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == 'user' and not message.content.startswith('<response>') %}
        {%- set ns.multi_step = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set thought = '' %}
    {%- if message.reasoning_content is string %}
        {%- set thought = message.reasoning_content %}
    {%- elif '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_query and (loop.last or thought) %}
        {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
    {%- else %}{{- content }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    "llama2": r"""{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate: user, assistant, user, ...') }}{% endif %}
{% if loop.index0 == 0 and system_message != false %}
{% set content = '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": r"""{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- "<|start|>system<|end|>\n\nToday: " + date_string + "\n\n" }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}""",
    "llama3 tools": r"""{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\n\n" + system_message + "<|eot|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("No user message to put the tools in") }}{%- endif %}
    {{- '<|start|>user<|end|>\n\nFunctions:\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("One call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant<|end|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- else %}
        {{- "<|start|>ipython<|end|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}""",
    "mistral": r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate user and assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("The id of a call has nine letters and digits") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}
{%- endfor %}""",
    "ministral": r"""{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system = "You speak plainly.\nToday is " + today + " (" ~ (today.split('-')[0] | int - 1) ~ " is past)." %}
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0]['content'] + '[/SYSTEM_PROMPT]' }}{%- set rest = messages[1:] %}
{%- else %}{{- '[SYSTEM_PROMPT]' + default_system + '[/SYSTEM_PROMPT]' }}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles: ' ~ message['role']) }}{%- endif %}
{%- endfor %}""",
    "gemma": r"""{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<turn>' + role + '\n' + message['content'] | trim + '</turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    "gemma3": r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<turn>' + message['role'] + '\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '</turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<turn>model\n'}}{%- endif -%}""",
    "phi3": r"""{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}
{{ '<|system|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + '<|end|>\n' }}{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + '<|end|>\n' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "phi4 mini": r"""{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}""",
    "olmo": r"""{{ eos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
' + message['content'] + eos_token }}
{% else %}
{{ '<|' ~ message.role ~ '|>
' ~ message['content'] }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "olmo3": r"""{%- set has_system = messages | selectattr('role', 'equalto', 'system') | list | length > 0 -%}
{%- if not has_system -%}{{- '<|im_start|>system\nYou help. ' -}}
    {%- if tools is none or (tools | length) == 0 -%}{{- 'You have no functions. <functions></functions>' -}}
    {%- else -%}{{- 'Functions: <functions>' + (tools | tojson) + '</functions>' -}}{%- endif -%}
    {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] -}}
    {%- if message.get('tool_calls', none) is not none -%}
        {{- '<calls>' -}}
        {%- for call in message['tool_calls'] -%}
            {{- call['function']['name'] + '(' -}}
            {%- for name, value in call['function']['arguments'].items() -%}
                {{- name + '=' + value | tojson -}}{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
            {%- endfor -%}
            {{- ')\n' if not loop.last else ')' -}}
        {%- endfor -%}
        {{- '</calls>' -}}
    {%- endif -%}
    {{- '<|im_end|>\n' if not loop.last else eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>' -}}{%- endif -%}""",
    "smollm3": r"""{# defaults #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
    {%- if "/no_think" in messages[0].content -%}{%- set reasoning_mode = "/no_think" -%}{%- endif -%}
    {%- set custom = messages[0].content.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{{- "<|im_start|>system\n## Facts\n\nToday: " ~ strftime_now("%d %B %Y") ~ "\nMode: " + reasoning_mode + "\n\n" -}}
{{- (custom + "\n") if custom else "Be kind.\n" -}}
{%- if python_tools or tools -%}
    {{- "### Functions\n" -}}
    {%- set ns = namespace(text="<tools>\n") -%}
    {%- for tool in tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\n" -%}{%- endfor -%}
    {{- ns.text + "</tools>\n" -}}
{%- endif -%}
{{- "<|im_end|>\n" -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else "" -%}
    {%- if message.role == "user" -%}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}
    {%- elif message.role == "assistant" -%}
        {% generation %}
        {%- if reasoning_mode == "/think" -%}{{ "<|im_start|>assistant\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- else -%}{{ "<|im_start|>assistant\n<think>\n\n</think>\n" + content.lstrip("\n") + "<|im_end|>\n" }}
        {%- endif -%}
        {% endgeneration %}
    {%- elif message.role == "tool" -%}{{ "<|im_start|>user\n" + content + "<|im_end|>\n" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>assistant\n" if reasoning_mode == "/think" else "<|im_start|>assistant\n<think>\n\n</think>\n" }}
{%- endif -%}""",
    "granite": r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Knowledge ends in April 2024.\nToday's Date: " + strftime_now('%B %d, %Y') + "." %}
    {%- if tools and documents %}{%- set system_message = system_message + "\nUse both functions and documents." %}
    {%- elif tools %}{%- set system_message = system_message + "\nUse functions." %}
    {%- elif documents %}{%- set system_message = system_message + "\nUse the documents; cite facts." %}
    {%- else %}{%- set system_message = system_message + "\nYou are helpful." %}{%- endif %}
    {%- if 'citations' in controls and documents %}
        {%- set system_message = system_message + '\n\nCite with <co> and </co>.' %}
    {%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|role|>system</role>' + system_message + '<|text|>\n' }}
{%- if tools %}{{- '<|role|>tools</role>' }}{{- tools | tojson(indent=4) }}{{- '<|text|>\n' }}{%- endif %}
{%- if documents %}
    {{- '<|role|>documents</role>' }}
    {%- for document in documents %}
        {{- 'Document ' + loop.index | string + '\n' }}{{- document['text'] }}
        {%- if not loop.last %}{{- '\n\n'}}{%- endif %}
    {%- endfor %}
    {{- '<|text|>\n' }}
{%- endif %}
{%- for message in loop_messages %}
    {{- '<|role|>' + message['role'] + '</role>' + message['content'] + '<|text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}{{- '</role>' }}
    {%- endif %}
{%- endfor %}""",
    "granite4": r"""{%- set tools_ns = namespace(lines='Functions within <tools></tools>:\n<tools>') -%}
{%- set documents_ns = namespace(lines='Documents:\n<documents>') -%}
{%- if tools -%}{%- for tool in tools -%}{%- set tools_ns.lines = tools_ns.lines ~ '\n' ~ (tool | tojson) -%}{%- endfor -%}
    {%- set tools_ns.lines = tools_ns.lines ~ '\n</tools>' -%}{%- else -%}{%- set tools_ns.lines = '' -%}{%- endif -%}
{%- if documents -%}{%- for document in documents -%}
    {%- set documents_ns.lines = documents_ns.lines ~ '\n' ~ (document | tojson) -%}{%- endfor -%}
    {%- set documents_ns.lines = documents_ns.lines ~ '\n</documents>' -%}
{%- else -%}{%- set documents_ns.lines = '' -%}{%- endif -%}
{{- '<|role|>system' ~ '\n\n'.join([tools_ns.lines, documents_ns.lines] | select | list) ~ '\n' -}}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|role|>user\n' }}{%- endif -%}
        {{- message.content -}}
    {%- else -%}{{- '<|role|>' ~ message.role ~ '\n' ~ message.content -}}
        {%- for call in message.tool_calls | default([], true) -%}{{- '\n' ~ call.function | tojson -}}{%- endfor -%}
    {%- endif -%}
    {{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|role|>assistant\n' -}}{%- endif -%}""",
    "ernie": r"""{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}
{%- if not cls_token is defined -%}{%- set cls_token = "<|begin|>" -%}{%- endif -%}
{%- if not sep_token is defined -%}{%- set sep_token = "<|sep|>" -%}{%- endif -%}
{{- cls_token -}}
{%- for message in messages -%}
    {%- if message["role"] == "user" -%}{{- "User: " + message["content"] + "
" -}}
    {%- elif message["role"] == "assistant" -%}{{- "Assistant: " + message["content"] + sep_token -}}
    {%- elif message["role"] == "system" -%}{{- message["content"] + "
" -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant: " -}}{%- endif -%}""",
    "cohere": r"""{{ bos_token }}{% if documents %}{% set tools = [] %}
{%- macro document_turn(documents) -%}
<|turn|><|chatbot|>{{ [{"name": "search", "parameters": {}}] | tojson }}<|end|><|turn|><|system|><results>
{% for doc in documents %}{{ loop.index0 }}: {% for key, value in doc.items() %}{% if value is string %}
{{ key }}: {{ value }}{% else %}{{ key }}={{ value | tojson(ensure_ascii=True) }}{% endif %}
{% if not loop.last %}; {% endif %}{% endfor %}

{% endfor -%}
</results><|end|>
{%- endmacro %}{% endif %}
{%- for message in messages %}<|turn|>
{%- if message.role | lower == 'system' %}<|system|>{{ message.content }}
{%- elif message.role | lower == 'user' %}<|user|>{{ message.content }}
{%- else %}<|chatbot|>{{ message.content }}{% endif %}<|end|>{% endfor %}
{%- if documents %}{{ document_turn(documents) }}{% endif %}
{%- if add_generation_prompt %}<|turn|><|chatbot|>{% endif %}""",
    "falcon": r"""{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}
{% if message['role'] == 'system' %}{{ 'System: ' }}{% elif message['role'] == 'user' %}{{ 'User: ' }}
{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}{{ message['content'] }}{% endfor %}
{% if add_generation_prompt %}{{ '\n' + 'Falcon:' }}{% endif %}""",
    "falcon3": r"""{% if tools %}{% for message in messages %}{% if message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + '\nFunctions:\n' }}{{ tools | tojson(indent=2) }}{{ '\n' }}{% endif %}{% endfor %}
{% endif %}{% for message in messages %}{% if message['role'] in ['user', 'assistant'] %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + (eos_token if message['role'] == 'assistant' else '') }}
{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}
{{ '\n<|assistant|>\n' }}{% endif %}{% endfor %}""",
    "opt": "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}",
    "starcoder": r"""{{ bos_token }}{% for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}

{% elif message.role == 'user' %}### Instruction
{{ message.content }}

{% else %}### Response
{{ message.content }}{{ eos_token }}

{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}### Response
{% endif %}""",
    "zephyr": "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
    "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "vicuna": r"""{%- set sep = cycler(' ', eos_token) -%}
A chat.{{ ' ' }}{% for message in messages %}{{ message.role | upper }}: {{ message.content }}{{ sep.next() }}{% endfor %}
{{- 'ASSISTANT:' if add_generation_prompt }}""",
    "typescript": r"""{%- macro type_of(spec, required=false) -%}
    {%- if spec.type == 'array' -%}{{- type_of(spec['items']) -}}{{ '[]' }}
    {%- elif spec.enum -%}{{- '"' + spec.enum | join('" | "') + '"' -}}
    {%- elif spec.type is iterable and spec.type is not string -%}{{- spec.type | join(' | ') -}}
    {%- elif spec.type in ('integer', 'number') -%}{{- 'number' -}}
    {%- elif spec.type == 'object' and spec.properties -%}
        {{- '{' }}{%- for name, inner in spec.properties.items() -%}
            {{- name }}{{ '' if name in (spec.required or []) else '?' }}: {{ type_of(inner) }}
            {%- if inner.default is defined %} // default: {{ inner.default | tojson }}{% endif %}
            {%- if not loop.last %}, {% endif -%}
        {%- endfor -%}{{ '}' }}
    {%- else -%}{{- spec.type | default('any') -}}{%- endif -%}
{%- endmacro -%}
{%- for tool in tools or [] -%}
// {{ tool.function.description }}
type {{ tool.function.name }} = (_: {{ type_of(tool.function.parameters) }}) => any;
{% endfor -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content }}{% if message.thinking %}<|thought|>{{ message.thinking }}{% endif %}
{%- for call in message.tool_calls or [] %} to={{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{% endif -%}""",
    "exaone": r"""{%- for m in messages if m.content or m.tool_calls -%}
    {{ '[|' ~ m.role ~ '|]' }}
    {%- if m.role == 'system' and loop.first %}{{ m.content | trim ~ '[|endofturn|]\n' }}{% continue %}{% endif %}
    {{- m.content.split("</think>") | last | trim }}
    {%- if m.role == 'assistant' %}{{ '[|endofturn|]' }}{% endif %}
    {{- '\n' if not loop.last or add_generation_prompt }}
{%- endfor %}
{{- '[|assistant|]<think>\n' if add_generation_prompt }}""",
    "loop controls": r"""{% for message in messages %}
{% if message.role == 'system' %}{% continue %}{% endif %}
{% for word in message.content.split() %}
{% if loop.index > 3 %}{{ '...' }}{% break %}{% endif %}
{% if word | length < 2 %}{% continue %}{% endif %}
{{ loop.index }}:{{ word }}
{% else %}
nothing
{% endfor %}
{% if loop.index == 4 %}{% break %}{% endif %}
{% endfor %}
{{ add_generation_prompt }}""",
    "generation": r"""{% set count = namespace(n=0) %}{% macro mark(text) %}<{{ text }}>{% endmacro %}
{% for message in messages %}
  {% if message.role == 'assistant' %}
    {% generation %}
    {% set text = message.content | trim %}{% set count.n = count.n + 1 %}
    {{ mark(text) }}{{ loop.index }}{{ count.n }}
    {% for letter in text[:2] %}{{ letter }}{% if loop.first %}{% continue %}{% endif %}{% endfor %}
    {% endgeneration %}
  {% else %}
    {{- message.content -}}  {%- generation -%}  x  {%- endgeneration -%}
  {% endif %}
  {{ text is defined }}
{% endfor %}
{% if add_generation_prompt %}{{ count.n }}{% endif %}""",
    "namespaces": r"""{% set ns = namespace({'a': 1}, b=[], self='me', found=false) %}
{% for message in messages %}{% set ns.b = ns.b + [message.role[0]] %}{% set ns.found = ns.found or message.name %}
{% set ns.a = ns.a * 2 %}{% set shadowed = message.role %}{% endfor %}
{{ ns.a }} {{ ns.b | join('-') }} {{ ns.self }} {{ ns.found }} {{ shadowed is defined }} {{ ns.missing is defined }}
{% set d = dict(x=1, **{'y': 2}) %}{{ d }}{{ dict([('k', 'v')]) }}{{ dict.fromkeys(['a', 'b']) }}
{{- dict.fromkeys('ab', 0) }}{% set a, b = 1, 'two' %}{{ a }}{{ b }}{{ d | dictsort | string }}{{ d.items() | list }}""",
    "white space": "  {% if true %}\n  a  \n  {% endif %}  \n\n{%+ if true %} b {%+ endif %}\n{%- if true -%}\n  c\n{%- endif -%}\n"
    "   {# comment #}\n x {#- another -#} y\n{% raw %}{{ raw }}\n{% endraw %}\n{{- ' d ' -}}\n  e\n\n"
    "{% for m in messages %}\n    - {{ m.content }}\n{% endfor %}\n\t{%- set z = 1 %}\n\t{{ z }}\r\n\r\n",
    "json": r"""{{ messages | tojson }}
{{ messages | tojson(indent=2) }}{{ messages[0] | tojson(ensure_ascii=True) }}
{{ messages[0] | tojson(separators=(',', ':')) }}{{ messages[0] | tojson(separators=(', ', ': '), indent=0, sort_keys=True) }}
{{ {'é': '<&\'">', 'n': none, 't': true, 'f': 1.0, 'big': 10 ** 20, 'list': [1, [2, {}]]} | tojson(true, 1) }}
{{ tools | tojson(indent=4, sort_keys=true) }}{{ documents | tojson(ensure_ascii=false) }}{{ 'a\u2028</script>' | tojson }}""",
    "filters": r"""{{ messages | map(attribute='role') | unique | sort(reverse=true) | join(',') }}
{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='content') | map('upper') | list }}
{% for role, group in messages | groupby('role') %}{{ role }}={{ group | length }};{% endfor %}
{{ messages[0].content | replace('a', 'A') | truncate(9) | center(20) }}|{{ messages[0].content | wordcount }}
{{ messages[-1].content | capitalize }}|{{ messages[-1].content | title | reverse }}|{{ 'x' | default('y') }}
{{ (messages[0].missing | default('none')) }}|{{ [3, 1, 2] | sort | first }}|{{ [1, 2, 3, 4] | batch(3, 0) | list }}
{{ 3.14159 | round(2) }}|{{ '7' | int + 1 }}|{{ [1, 2] | sum }}|{{ 'a b' | urlencode }}|{{ '<b>' | escape }}|{{ 'ab' | list }}
{{ '%s-%05.2f' | format('x', 2.5) }}|{{ messages[0] | items | list | length }}|{{ 'line\nline' | indent(2) }}""",
    "strings": r"""{% set text = messages[-1].content %}
{{ text.strip().split(' ')[-1] }}|{{ text[::-1] }}|{{ text[1:-1] }}|{{ text.find('o') }}|{{ 'o' in text }}
{{ text.startswith('a') or text.endswith('?') }}|{{ text.upper().lower().title() }}|{{ text.count('a') }}|{{ text * 2 }}
{{ '{}-{a}'.format(1, a='b') }}|{{ 'a,b,,c'.split(',') }}|{{ ' a '.lstrip() ~ '|' ~ ' a '.rstrip() }}|{{ 'x'.join(['1', '2']) }}
{{ "tab\tquote\"é\u00e9\x41" }}|{{ 'a' 'b' }}|{{ 1 / 2 }}|{{ 7 // 2 }}|{{ 7 % 3 }}|{{ 2 ** 8 }}|{{ -3 | abs }}|{{ 1 ~ none }}""",
    "blocks": r"""{% set text %}
  {{ messages[0].content }} in a block
{% endset %}{{ text | trim }}
{% filter upper %}{{ messages[0].role }} shouts{% endfilter %}
{% with a = 1, b = 'x' %}{{ a }}{{ b }}{% endwith %}{{ a is defined }}
{% macro wrap(tag='t', n=1) %}<{{ tag }}>{{ caller(n) }}</{{ tag }}>{{ varargs }}{{ kwargs }}{% endmacro %}
{% call(x) wrap('p', 2, 3, k=4) %}{{ x }}: {{ messages | length }}{% endcall %}
{% for m in messages recursive %}{{ loop.depth }}{% if loop.changed(m.role) %}!{% endif %}{{ (loop.previtem or m).role }}{% endfor %}
{% for i in range(3) if i != 1 %}{{ i }}{{ loop.cycle('a', 'b') }}{{ loop.revindex }}{% else %}none{% endfor %}""",
    "tests": r"""{% for value in [1, 1.5, 'a', none, true, [], {}, missing] %}
{{ value is defined }}{{ value is none }}{{ value is number }}{{ value is string }}{{ value is mapping }}
{{- value is sequence }}{{ value is iterable }}{{ value is boolean }}{{ value is integer }}{{ value is float }}
{% endfor %}{{ 'role' in messages[0] }}{{ messages[0] is sameas messages[0] }}{{ 4 is divisibleby 2 }}{{ 3 is odd }}
{{ messages | length > 1 and messages[1].role is eq 'assistant' }}{{ 'x' is in ['x'] }}{{ 'A' is upper }}{{ 1 is ne 2 }}""",
    "exceptions": r"""{% for message in messages %}{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{ raise_exception('Unexpected role: ' + message.role + ' in message ' ~ loop.index) }}{% endif %}
{% if loop.last and message.role == 'assistant' and add_generation_prompt %}{{ raise_exception("'ends' with assistant") }}
{% endif %}{{ message.content }}{% endfor %}""",
    "dates": r"""{{ strftime_now("%Y-%m-%d %A %B %j") }}{{ strftime_now('') }}{% if strftime_now is defined %}
{{ strftime_now("%d %b %Y").split() | last }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}""",
    "reasoning": r"""{% for m in messages %}{{ m.role }}{% for name in ['thinking', 'reasoning_content', 'reasoning'] %}
{{ name }}={{ m[name] }}{% endfor %}{{ m.keys() | list }}:{{ m.content }}
{% endfor %}""",
    "quirks": r"""{% set messages = messages | list %}{% if messages and messages[0].get('role') == 'system' %}
{% set messages = messages[1:] %}{% endif %}{% for i in range(messages | length) %}{% set m = messages[i] %}
{{ m['role'] ~ ':' ~ m.get('content', '') ~ (m.get('name') or '') }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}
{{ pad_token is defined }}{{ unk_token }}{{ mask_token }}{{ undefined_variable }}{{ messages[99] }}{{ loop }}{{ lipsum is defined }}
{{ joiner is defined }}{{ self is defined }}{{ (1, 2) }}{{ [1, none, true] }}{{ 'a' if false }}{{ {'a': 'b'}.a }}{{ 1 if add_generation_prompt }}""",
}
"""name -> source"""
