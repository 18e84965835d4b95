"""Packed documents: where each begins and ends, and the tiles of work they are cut into."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.packing.blocks import Blocks as Blocks
    from flamia_ref.packing.blocks import key_blocks as key_blocks
    from flamia_ref.packing.blocks import query_blocks as query_blocks
    from flamia_ref.packing.documents import Documents as Documents
    from flamia_ref.packing.mask import Mask as Mask
    from flamia_ref.packing.pairs import PairOrder as PairOrder
    from flamia_ref.packing.pairs import TilePairs as TilePairs
    from flamia_ref.packing.pairs import passes as passes
    from flamia_ref.packing.pairs import tile_pairs as tile_pairs
    from flamia_ref.packing.tiles import QueryTiles as QueryTiles
    from flamia_ref.packing.tiles import TileSize as TileSize
    from flamia_ref.packing.tiles import guarded_blocks as guarded_blocks
    from flamia_ref.packing.tiles import query_tiles as query_tiles
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "blocks": ["Blocks", "key_blocks", "query_blocks"],
            "documents": ["Documents"],
            "mask": ["Mask"],
            "pairs": ["PairOrder", "TilePairs", "passes", "tile_pairs"],
            "tiles": ["QueryTiles", "TileSize", "guarded_blocks", "query_tiles"],
        },
    )
