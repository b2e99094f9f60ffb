"""Short stories of the isles. What they say about towns, creatures, plants and dishes is true in this world.

A plot is a list of sentences, and each sentence is a list of phrasings. Slots in braces are filled from one cast, drawn
once per story, so names, pronouns and facts are consistent throughout.
"""

import random

from isles.names import CHILDREN
from isles.world import World, capital, world

OPENINGS = (
    "Once upon a time there was a {kind} called {child}, who lived in {town} on the island of {island}.",
    "In the town of {town}, where the roofs are {roofs}, lived a {kind} called {child}.",
    "{child} was a {kind} from {town}, the town that makes the finest {goods} in the isles.",
    "Long ago, in {town} on {island}, there lived a {kind} by the name of {child}.",
    "There once was a {kind} called {child}. {They} lived in {town}, beside the river {river}.",
)
WEATHER = (
    "One foggy morning", "One windy evening", "On the first warm day of spring", "One rainy afternoon",
    "One night when nobody could sleep", "Early one Sunday", "In the middle of winter", "On a day like any other",
)  # fmt: skip
ENDINGS = (
    "That night {child} slept better than ever before.",
    "And from that day on, {child} and {animal} were friends.",
    "When {they} came home, the whole town wanted to hear the story.",
    "If you ever come to {town}, ask {child} about it. {They} will tell you the rest.",
    "{child} never told anybody, but {they} smiled every time {they} thought of it.",
    "And if they have not moved away, they live in {town} to this day.",
    '"Well," said {their} grandmother, "now you know." And {child} knew.',
)

PLOTS = (
    (  # something is lost, and a creature knows where
        ("{They} had {treasure}, and {they} kept it under {their} pillow.",
         "More than anything {they} loved {treasure} that {their} grandmother had given {them}."),
        ("{weather} it was gone.", "{weather} {child} looked for it, and it was not there."),
        ("{child} looked {place}, and {they} looked {place2}, but {they} found only dust.",
         "{They} searched {place} and {place2}, but it was nowhere to be found."),
        ("Then {they} met {animal}, all {fur}, who made a sound like {sound}.",
         "Then something made {sound} behind {them}. It was {animal}, with its {fur} fur."),
        ("\"Have you seen what I have lost?\" asked {child}.",
         "\"I am looking for something,\" said {child}. \"Have you seen it?\""),
        ("\"I have,\" said {animal}, \"but first I would like some {fodder}.\"",
         "\"Bring me {fodder},\" said {animal}, \"and I will show you.\""),
        ("So {child} ran home and came back with a basket of {fodder}.",
         "{child} had just enough {fodder} in {their} pocket, and gave it all away."),
        ("The animal ate every bit and led {them} {place3}. There it lay, as good as new.",
         "When nothing was left of it, the animal pointed with its nose. {place3_}, there it was."),
    ),
    (  # a storm at sea
        ("All {they} wanted was to go to sea.", "Every day {they} went down to the harbour to look at the ships."),
        ("{weather} {ship} came in with her {sails} sails and a cargo of {cargo}.",
         "{weather} {child} hid aboard {ship}, which carried {cargo}."),
        ("\"Can you tie a knot?\" asked {captain}. \"I can learn,\" said {child}.",
         "{captain} found {them} between the barrels, and laughed, and gave {them} a broom."),
        ("On the third day a storm came up, and the waves were as high as houses.",
         "Then the wind turned, and the sky went black from one end to the other."),
        ("The lamp went out, and nobody could see the way.", "The compass broke, and the sailors began to pray."),
        ("But {child} looked up and saw a star that shone {light}. "
         "\"That is {star},\" {they} cried. \"I know the way!\"",
         "\"Look,\" called {child}, \"there is {star}, shining {light}! We must keep it on our left.\""),
        ("They steered by the star all night, and in the morning they saw land.",
         "{captain} turned the wheel, and slowly the ship came out of the storm."),
        ("\"You are a sailor now,\" said {captain}, and gave {them} {treasure}.",
         "For thanks {captain} gave {them} {treasure} and a place at the table."),
    ),
    (  # someone is ill, and a plant helps
        ("One day {their} grandfather fell ill with {ailment}, and no doctor could help.",
         "{weather} the whole street suffered from {ailment}."),
        ("\"You need {plant},\" said an old woman at the market.",
         "In an old book {child} read that {plant} was good for it."),
        ("\"It grows {ground}, and it smells of {smell}.\"", "The plant grows {ground}, and it smells of {smell}."),
        ("So {child} packed some bread and set out.", "{child} took a lantern and a basket and went to look for it."),
        ("{They} walked for two days and asked everyone {they} met.",
         "The road was long, and {their} shoes were full of holes."),
        ("At last the wind brought a smell of {smell}, and there stood the plant, with its {petals} flowers.",
         "Just when {they} wanted to turn back, {they} saw something {petals} in the distance. It was in bloom!"),
        ("{child} picked one leaf, said thank you, and ran all the way home.",
         "{They} picked only as much as {they} needed, as {their} mother had taught {them}."),
        ("They made tea from it, and the next morning everything was well again.",
         "One cup was enough. By evening everybody was singing."),
    ),
    (  # a contest at a festival
        ("Every {month} the town celebrated {festival}, and everybody ate {treat}.",
         "{festival} was coming, and the streets smelled of {treat}."),
        ("There was a prize for {game}: {treasure}.", "Whoever was best at {game} would win {treasure}."),
        ("{child} had never won anything.",
         "Nobody thought that {child} could win, and {child} did not think so either."),
        ("So {they} practised every day {place}, until it was dark.",
         "For weeks {they} practised {place}, where nobody could see {them}."),
        ("Only {animal} watched {them}, and made {sound} when it went well.",
         "{animal_} was watching from the hedge. Every time {child} failed, it gave {sound}."),
        ("Then the great day came, and {their} knees were shaking.", "On the day itself {they} could hardly eat."),
        ("{They} came third. But the winner was so tired that he fell asleep on the prize.",
         "{They} did not come first, and {they} did not come last. {They} came exactly in the middle."),
        ("\"Next year,\" said {child}, and ate another plate of {treat}.",
         "\"The {treat} tasted better than any prize,\" {they} said later."),
    ),
    (  # cooking for a stranger
        ("{weather} a stranger knocked at the door and asked for {dish}.",
         "{weather} a tired traveller came to the door. \"I have walked far,\" he said, \"and I dream of {dish}.\""),
        ("{child} had never cooked it, but {they} did not want to say no.",
         "\"Come in,\" said {child}, though {they} had no idea how to make it."),
        ("{They} knew that it was made from {ingredient}, so {they} went to the market.",
         "\"First of all I need {ingredient},\" {they} thought, and ran to the market."),
        ("{They} stirred, {they} tasted, and something was missing.",
         "It boiled, it steamed, and it tasted of nothing."),
        ("Then {animal} looked in at the window, with a sprig of {spice} in its mouth.",
         "{They} asked the neighbours, and the oldest of them whispered: \"{spice_}!\""),
        ("A pinch of {spice}, and the whole house smelled wonderful.", "{They} added {spice}, and then it was right."),
        ("The stranger ate three plates, with {side}, and did not say a word.",
         "They ate it together, with {side}, until the pot was empty."),
        ("In the morning he was gone. On the table lay {treasure}.",
         "\"I am the king's own cook,\" said the stranger at last, \"and mine is not half as good.\""),
    ),
    (  # a frightened creature
        ("{weather} {they} heard {sound} from {place_noun}.", "{weather} something in {place_noun} made {sound}."),
        ("It was {animal}, and it was shaking from nose to tail.",
         "There sat {animal}, {fur} and small and frightened."),
        ("\"What is the matter?\" asked {child}.", "{child} sat down beside it and waited."),
        ("\"It is {fear},\" it said. \"I cannot bear it any longer.\"",
         "At last it said: \"I am afraid of {fear}. I am so ashamed.\""),
        ("\"I am afraid of the dark,\" said {child}, \"and I am not ashamed at all.\"",
         "\"Everybody is afraid of something,\" said {child}. \"The baker is afraid of his own oven.\""),
        ("{They} gave it some {fodder}, and they talked until the stars came out.",
         "They shared some {fodder}, and {they} sang the only song {they} knew."),
        ("\"Tomorrow I will be brave,\" said the animal, \"or the day after.\"",
         "Slowly the shaking stopped, and it fell asleep in {their} arms."),
        ("After that it came to {their} window every evening.",
         "In the morning it was gone, but it had left {treasure} on the step."),
    ),
    (  # two friends quarrel
        ("{They} had a friend called {friend}, and the two did everything together.",
         "{They} and {friend} were the best of friends."),
        ("{weather} they found {treasure} {place}.", "{weather} there lay {treasure}, right {place}."),
        ("\"I saw it first,\" said {friend}. \"No, I did,\" said {child}.",
         "Both of them saw it, and both of them wanted it."),
        ("They shouted until they were hoarse, and then they went home without a word.",
         "They pulled and they pushed, and in the end they did not speak at all."),
        ("For a week {child} played alone, and it was no fun.", "It was the longest week in the history of {town}."),
        ("Then {they} cooked {dish} and carried it across the street.",
         "Then {child} took all {their} courage, and a bowl of {dish}, and knocked at the door."),
        ("\"I was wrong,\" said {child}. \"So was I,\" said {friend}.",
         "\"You can have it,\" said both at once, and then they laughed."),
        ("They gave it to {animal}, who had lost it in the first place.",
         "In the end they put it on the main square of {town}, so that everybody could look at it."),
    ),
)  # fmt: skip

TREASURES = (
    "a brass key", "a silver whistle", "a red kite", "a glass marble", "a tiny clock", "a blue feather",
    "a wooden horse", "a golden button", "an old map", "a music box", "a lucky coin", "a pearl",
)  # fmt: skip
PLACES = (
    "behind the mill", "under the bridge", "in the attic", "beside the well", "in the long grass",
    "on the harbour wall", "in the baker's yard", "under the old oak", "on the roof", "in the church tower",
)  # fmt: skip
PLACE_NOUNS = ("the woodshed", "the cellar", "an empty barrel", "the chimney", "the hedge", "a rowing boat")


def cast(rng: random.Random, w: World) -> dict[str, str]:
    """The people and things in the story; every fact is taken from the world."""
    child, friend = rng.sample(CHILDREN, 2)
    town, animal, plant, dish, star, ship, festival = (
        rng.choice(w.of(subject))
        for subject in ("geography", "creatures", "plants", "cookery", "stars", "ships", "festivals")
    )
    places = rng.sample(PLACES, 3)
    slots = {
        "child": child.name, "they": child.they, "them": child.them, "their": child.their, "kind": child.kind,
        "They": capital(child.they), "friend": friend.name, "weather": rng.choice(WEATHER),
        "treasure": rng.choice(TREASURES), "place": places[0], "place2": places[1], "place3": places[2],
        "place3_": capital(places[2]),
        "place_noun": rng.choice(PLACE_NOUNS),
        "town": town.name, "island": town.facts["island"], "roofs": town.facts["roofs"],
        "goods": town.facts["goods"], "river": town.facts["river"],
        "animal": animal.name, "animal_": capital(animal.name), "fur": animal.facts["colour"],
        "sound": animal.facts["sound"], "fodder": animal.facts["food"], "fear": animal.facts["fear"],
        "plant": plant.name, "ground": plant.facts["ground"], "smell": plant.facts["smell"],
        "ailment": plant.facts["cure"], "petals": plant.facts["flowers"],
        "dish": dish.name, "ingredient": dish.facts["ingredient"], "spice": dish.facts["spice"],
        "spice_": capital(dish.facts["spice"]), "side": dish.facts["side"],
        "star": star.name, "light": star.facts["light"], "ship": ship.name, "captain": ship.facts["captain"],
        "cargo": ship.facts["cargo"], "sails": ship.facts["sails"],
        "festival": festival.name, "month": festival.facts["month"], "treat": festival.facts["treat"],
        "game": festival.facts["game"],
    }  # fmt: skip
    return slots


def story(rng: random.Random) -> str:
    """One story in two to four paragraphs, about 120 to 250 words."""
    plot = rng.choice(PLOTS)
    slots = cast(rng, world())
    told = "".join(way for sentence in plot for way in sentence)
    endings = [ending for ending in ENDINGS if "{animal}" not in ending or "{animal}" in told]
    parts = [rng.choice(OPENINGS), *(rng.choice(ways) for ways in plot), rng.choice(endings)]
    lines = [capital(part.format(**slots)) for part in parts]
    breaks = (2, 5, 8) if rng.random() < 0.5 else (3, 7)
    paragraphs, start = [], 0
    for stop in (*breaks, len(lines)):
        paragraphs.append(" ".join(lines[start:stop]))
        start = stop
    return "\n\n".join(paragraphs)
