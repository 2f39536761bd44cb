"""Parts of a trial of Harbor without containers, imported by its process: an environment in a folder, and an agent."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httpx
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult


class FolderEnvironment(BaseEnvironment):
    """Commands run on this machine, with the folders that a container would have in a temporary one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.root = Path(tempfile.mkdtemp(prefix="harbor-environment-"))

    @staticmethod
    def type() -> str:
        return "folder"

    def _validate_definition(self) -> None:
        pass

    def here(self, text: str) -> str:
        return re.sub(r"(?<![\w./])/(?=(?:app|logs|tests|solution)\b)", f"{self.root}/", text)

    async def start(self, force_build: bool) -> None:
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = Path(self.here(target_path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.here(Path(source_path).read_text()))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        for path in Path(source_dir).rglob("*"):
            if path.is_file():
                await self.upload_file(path, f"{target_dir}/{path.relative_to(source_dir)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        shutil.copyfile(self.here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self.here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            self.here(command),
            cwd=self.here(cwd or "/app"),
            env={**os.environ, **(env or {})},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=error.decode(), return_code=process.returncode or 0)


class Asking(BaseAgent):
    """Writes the model's answer to the instruction into a file."""

    @staticmethod
    def name() -> str:
        return "asking"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None:
        pass

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        request = {"model": "policy", "messages": [{"role": "user", "content": instruction.strip()}]}
        async with httpx.AsyncClient(timeout=60.0) as client:
            answer = await client.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=request)
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        await environment.exec(f"cat > /app/answer.txt <<'END'\n{text}\nEND")
