"""Text among images: corrects verl's forward of Qwen2-VL for micro-batches without any image.

verl sends zeros through the vision tower then, so that all ranks gather its weights, and takes a mean of the result,
which transformers 5 returns as an object with several tensors (verl 0.9.1: "object has no attribute 'mean'").
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replaces verl's function that embeds tokens and images. Idempotent."""
    from verl.models.transformers import qwen2_vl
    from verl.utils.transformers_compat import unpack_visual_output

    original = qwen2_vl._get_input_embeds
    if original.__module__ == __name__:
        return

    def embeds(
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the embeddings of the tokens, float ``[rows, tokens, hidden]``, and the mask."""
        if pixel_values is not None or pixel_values_videos is not None:
            found: tuple[torch.Tensor, torch.Tensor | None] = original(
                model, input_ids, attention_mask, pixel_values, pixel_values_videos, image_grid_thw, video_grid_thw
            )
            return found
        words: torch.Tensor = model.get_input_embeddings()(input_ids)
        # While sampling in this process, no rank waits for the tower and no gradient is wanted.
        if torch.is_grad_enabled() or (dist.is_initialized() and dist.get_world_size() > 1):
            config = model.config.vision_config
            width = config.in_channels * config.temporal_patch_size * config.patch_size**2
            grid = torch.tensor([[1, 4, 4]], device=words.device)
            tower = model.visual(words.new_zeros((16, width)), grid_thw=grid)
            words = words + 0.0 * unpack_visual_output(tower)[0].mean()
        return words, attention_mask

    qwen2_vl._get_input_embeds = embeds
