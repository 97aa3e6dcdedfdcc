"""The Hub around a training: the target is checked before, the model card cleaned, a failed push explained.

Free of trainer internals: these functions take arguments, folders and names.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from transformers import TrainingArguments

CARD_TAGS = ("lora", "peft", "zerolock")
CARD_NAME = "README.md"


def check_hub_target(args: TrainingArguments) -> str | None:
    """Checks name, identity and visibility of the repository that a training is going to be pushed to.

    Call it before `transformers.Trainer.__init__`, which creates the repository.

    Args:
        args: `push_to_hub`, `hub_model_id`, `hub_token`, `hub_private_repo` and `output_dir` are read.

    Returns:
        The full name `user/repository`, or None where nothing is to be pushed.

    Raises:
        ValueError: the name is not valid, nobody is logged in, the token cannot write there, the Hub cannot be
            reached, or `hub_private_repo=True` and the repository exists and is public.
    """
    if not args.push_to_hub:
        return None
    name = args.hub_model_id or Path(str(args.output_dir)).absolute().name
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(
            f"push_to_hub: {name!r} is not a repository name ({error}). Set hub_model_id to 'user/name'."
        ) from error
    api = HfApi(token=args.hub_token)
    try:
        repo_id = _writable_name(api, name)
        public = _exists_in_public(api, repo_id)
    except LocalTokenNotFoundError as error:
        raise ValueError(
            f"push_to_hub to {name!r}, but nobody is logged in. Run `hf auth login`, or set HF_TOKEN or hub_token."
        ) from error
    except (HTTPError, OSError) as error:
        raise ValueError(
            f"push_to_hub to {name!r}: the Hub at {api.endpoint} did not let us check the target "
            f"({type(error).__name__}: {error}). Check the connection, HF_HUB_OFFLINE and the token, or set "
            "push_to_hub=False and upload later with `hf upload`."
        ) from error
    if public and args.hub_private_repo:
        raise ValueError(
            f"hub_private_repo=True, but the repository {repo_id!r} exists already and is public: the adapter would "
            "be published. Choose another hub_model_id, make that repository private in its settings, or set "
            "hub_private_repo=False."
        )
    return repo_id


def _writable_name(api: HfApi, name: str) -> str:
    identity = api.whoami()
    owner, _, short_name = name.rpartition("/")
    allowed = [identity["name"], *(group["name"] for group in identity.get("orgs", []))]
    if owner and owner not in allowed:
        raise ValueError(
            f"push_to_hub to {name!r}: {identity['name']!r} is logged in and may write to {', '.join(allowed)}. "
            "Set hub_model_id to one of these, or log in with another token."
        )
    if identity.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            f"push_to_hub to {name!r}: the token of {identity['name']!r} can only read. Log in with a write token."
        )
    return f"{owner or identity['name']}/{short_name}"


def _exists_in_public(api: HfApi, repo_id: str) -> bool:
    try:
        return not api.model_info(repo_id).private
    except RepositoryNotFoundError:
        return False


@contextmanager
def explain_failed_push(folder: str | os.PathLike, repo_id: str) -> Iterator[None]:
    """Wraps a push: a failure says where the adapter is kept and how to send it again.

    Raises:
        RuntimeError: the Hub or the connection failed inside the block.
    """
    try:
        yield
    except (HTTPError, OSError) as error:
        raise RuntimeError(
            f"the push to {repo_id!r} failed ({type(error).__name__}: {error}). Nothing is lost: the adapter is in "
            f"{str(folder)!r}. To push it again: hf upload {repo_id} {str(folder)!r} . --exclude 'checkpoint-*/*'"
        ) from error


def is_hub_name(name: str | None) -> bool:
    """Whether a model name can be one of the Hub's, rather than a folder or file of this machine."""
    if not name or Path(name).expanduser().exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def clean_card(
    folder: str | os.PathLike, base_model: str | None = None, tags: Iterable[str] = (), paths: Iterable[str] = ()
) -> None:
    """Makes the model card in `folder` fit to be published; does nothing where there is no card.

    Afterwards `base_model` is in its metadata if that is a Hub name, the tags include lora, peft and zerolock, and no
    local path is left: neither that of the base model, nor that of `folder`, nor any of `paths`.

    Args:
        folder: where README.md is.
        base_model: name of the base model as it was loaded; by default the one in the card.
        tags: further tags.
        paths: further local paths to remove.
    """
    card_path = Path(folder) / CARD_NAME
    if not card_path.exists():
        return
    card = ModelCard.load(card_path)
    written = card.data.get("base_model")
    base_model = base_model or (written if isinstance(written, str) else None)
    on_hub = is_hub_name(base_model)
    if on_hub:
        card.data["base_model"] = base_model
    else:
        card.data.pop("base_model", None)
    kept = [tag for tag in card.data.get("tags") or [] if not tag.startswith("base_model:")]
    relation = [f"base_model:adapter:{base_model}"] if on_hub else []
    card.data["tags"] = sorted({*kept, *relation, *tags, *CARD_TAGS})
    card.data["library_name"] = "peft"
    local = {str(path) for path in (written, *paths) if isinstance(path, str) and path and not is_hub_name(path)}
    local |= {str(folder), *([] if on_hub or not base_model else [base_model])}
    card.text = _without_paths(card.text, local)
    card.save(card_path)


def _without_paths(text: str, paths: Iterable[str]) -> str:
    """`text` with links to local paths named "a local model" and other mentions cut to their last part."""
    text = text.replace("[](https://huggingface.co/)", "a model without a name")
    spellings = {spelling for path in paths for spelling in (path, str(Path(path).expanduser().absolute()))}
    for path in sorted(spellings, key=len, reverse=True):
        if os.sep not in path:
            continue
        text = re.sub(rf"\[{re.escape(path)}\]\([^)]*\)", "a local model", text)
        text = text.replace(path, Path(path).name)
    return text
