"""What is recorded about a session has no secrets, and is still a configuration."""

from __future__ import annotations

from pipelinerl.config.load import load_config
from pipelinerl.config.schema import RunConfig
from pipelinerl.config.secrets import REMOVED, without_secrets


def test_passwords_and_keys_are_removed_and_nothing_else() -> None:
    args = {
        "api_key": "a",
        "judge": {"token": "b", "OPENAI_API_KEY": "c", "max_tokens": 12, "stop": ["https://me:d@host/x", "plain @ text"]},
        "key": 7,
        "accessToken": 123,
        "apiKeys": ["a", "b"],
        "login": {"passwords": ["x"], "secret": None},
        "page": "https://host/x?api_key=abc&n=3",
        "monkey": "banana",
    }
    config = load_config(
        None,
        {
            "stream.kind": "redis",
            "stream.url": "rediss://user:pass@10.0.0.5:6379/0",
            "environment.args": args,
            "engine.kind": "http",
            "engine.urls": ["http://admin:pw@host:8000"],
            "engine.api_key_env": "MY_KEY",
            "correction.token": "tv",
        },
    )
    found = without_secrets(config)
    assert found["environment"]["args"] == {
        "api_key": REMOVED,
        "judge": {"token": REMOVED, "OPENAI_API_KEY": REMOVED, "max_tokens": 12, "stop": ["https://host/x", "plain @ text"]},
        "key": REMOVED,
        "accessToken": REMOVED,
        "apiKeys": REMOVED,
        "login": {"passwords": REMOVED, "secret": None},
        "page": f"https://host/x?api_key={REMOVED}&n=3",
        "monkey": "banana",
    }
    assert found["correction"] == config.correction.model_dump()
    assert found["stream"]["url"] == "rediss://10.0.0.5:6379/0"
    assert found["engine"]["urls"] == ["http://host:8000"]
    assert found["engine"]["api_key_env"] == "MY_KEY", "the name of a variable is no secret"
    assert RunConfig.model_validate(found).trainer == config.trainer
