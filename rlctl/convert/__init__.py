"""Launch scripts and configurations of other frameworks → a spec, and a spec → theirs. No torch.

`shell`, `source` read a file into settings; `frameworks/*.toml` say what each key means here; `translate` and
`export` apply these tables; `report` writes what became of every key.
"""
