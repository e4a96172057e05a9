#!/usr/bin/env python3
"""Lets `ollama run MODEL`, which knows no tools, be the model of a pod. In ~/.config/insomnia/manifest.json:
{"provider": {"kind": "command", "command": ["/path/to/ollama-model.py", "qwen3:8b"]}}
Any program that reads a prompt and prints an answer can stand in its place: ollama-model.py -- llm -m MODEL
"""

import json
import subprocess
import sys

if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)
command = sys.argv[2:] if sys.argv[1] == "--" else ["ollama", "run", *sys.argv[1:]]
request = json.load(sys.stdin)

HOW = """To use a tool, write a line that begins with TOOL and goes on with one JSON object, and nothing after it:
TOOL {"name": "ReadFile", "input": {"path": "a.txt"}}
You then get its result. Without such a line your answer is final. The tools, with the schemas of their inputs:"""
prompt = [request["system"], HOW, *(json.dumps(tool) for tool in request["tools"]), "The conversation so far:"]
for item in request["messages"]:
    match item["type"]:
        case "input" | "notification":
            prompt.append(f"[{item.get('from') or 'user'}] {item['text']}")
        case "assistant":
            prompt.append(f"[you] {item['text']}")
            prompt += ["TOOL " + json.dumps(call) for call in item.get("tool_calls", [])]
        case "tool_result":
            prompt.append(f"[result of {item['name']}] {item['text']}")


def tell(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


try:
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
except OSError as error:
    tell("error", message=f"cannot run {command[0]}: {error}")
    sys.exit(0)
program.stdin.write("\n".join(prompt))
program.stdin.close()
for line in program.stdout:
    if line.startswith("TOOL "):
        call = json.loads(line[5:])
        tell("tool_call", name=call["name"], input=call.get("input", {}))
    else:
        tell("text", text=line)
if program.wait() != 0:
    sys.exit(75)  # what went wrong may pass: the pod tries again, up to its limit
tell("done")
