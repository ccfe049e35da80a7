import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """No test leaves anything in the repository."""
    monkeypatch.chdir(tmp_path)
