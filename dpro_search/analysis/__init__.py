"""Answers to the questions that users ask about a job: one module a question.

Each function takes a job and a scenario and returns a frozen `msgspec.Struct`. ``msgspec.json.encode(answer)`` is what the verb of
the command line prints with ``--json``; the Python API and the report use the same structs.
"""
