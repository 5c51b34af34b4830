"""The sentences of the stories, as data.

`[a|b]` picks one side, may be empty and may nest; `{slot}` is filled from the story's cast and props, which stay
the same for the whole story; a line that starts with `?` is left out half of the time. `corpus.py` expands it.
Hero slots: hero, hero_full, hero_long, he, him, his. Friend slots: the same words with an f in front.
"""

from typing import NamedTuple


class Plot(NamedTuple):
    """Event of a story.

    Attributes:
        friend: "known" if the friend is named before the plot begins, "met" if the plot does it, "" if nobody else.
        lines: The templates, in order.
        moral: Lesson that the hero may learn from it.
    """

    friend: str
    lines: tuple[str, ...]
    moral: str


WHEN = "[One [{sky} |]{part}|One [{sky} |]{part}|On a {sky} {part}|Early one morning|Late one evening|One day]"
WHEN_LATER = "[Later that day|After a while|The next {part}|The next day|Soon after that]"

OPENINGS = (
    "Once upon a time, there was {hero_full}.",
    "Once upon a time, there was {hero_full} who lived {home}.",
    "Once upon a time, there was {hero_full} who [loved|liked] to {hobby}.",
    "Once upon a time, {hero_full} lived {home}.",
    "There was once {hero_full} who [loved|liked] to {hobby}.",
    "Long ago, {hero_full} lived {home}.",
    "{hero_long} lived {home}.",
    "{hero_long} lived {home} with {his} {family}.",
    "{hero_long} [loved|liked] to {hobby}.",
    "{hero_long} was very {trait}.",
    "{hero_long} had a {thing}.",
)
SCENES = (
    "{hero_long} went {place}[| with {his} {family}].",
    "{hero_long} wanted to {hobby}.",
    "{hero_long} was [very |so |][happy|sad|tired|excited][| that day].",
    "One {sky} {part}, {hero_long} [went|walked|ran] {place}.",
    "It was a {sky} {part}, and {hero_long} [went|walked|ran] {place}.",
)

TRAITS = (
    "{he} was very {trait}.",
    "{he} was {trait} and {trait2}.",
    "{he} [loved|liked] to {hobby2}.",
    "[Every day|Every morning|Every evening], {he} went {place2}.",
    "[Every day|Each morning], {he} played with {his} {thing3}.",
    "{he} had a {thing3} and a {thing4}.",
    "{his} {family2} and {his} {family3} loved {him} very much.",
    "[Everyone|All the animals|The other children] [loved|liked] {him}.",
    "{his} favorite food was {flavor} {dish}.",
)

FRIEND_INTROS = (
    "{his} best friend was {friend_full}.",
    "{he} had a friend, {friend_full}.",
    "{he} [often|always] played with {friend_full}.",
    "Next door lived {friend_full}.",
)

PLOTS = (
    Plot(
        "known",
        (
            "{when}, {hero} could not find {his} {thing}.",
            "?{hero} [felt|was] [very |so |]sad.",
            "{he} looked {indoors} and {indoors2}, but [it was not there|the {toy} was gone].",
            '"[Have you seen my|Did you see my|Do you have my] {toy}?" {he} asked {friend}.',
            '"[No, but I can help you|No, but we can look together|I will help you find it]," said {friend}.',
            "[They|The two friends|{hero} and {friend}] looked [all day|for a long time|everywhere].",
            "[At last|Then|Soon], {friend} [found|saw] the {toy} {hidden}.",
            '"[Thank you|Thank you so much|Oh, thank you], {friend_call}!" said {hero}.',
        ),
        "friends help each other",
    ),
    Plot(
        "met",
        (
            "{when}, {hero} [went|walked] {place2}.",
            "There {he} [saw|met|found] {friend_full} {hidden}.",
            "{friend} [looked|was] [sad|lonely|very sad].",
            '"[Why are you sad|What is wrong|Are you all right]?" asked {hero}.',
            '"I have [no friends|nobody to play with|no one to talk to]," [said|answered|whispered] {friend}.',
            (
                '"[I will be your friend|We can be friends|You can play with me]," said {hero}[| happily| '
                "softly| with a smile]."
            ),
            (
                "[They|The two of them] played [with the {toy}|in the [grass|leaves|sun]|hide and seek] "
                "until [the sun went down|it was dark]."
            ),
        ),
        "it is easy to make a friend",
    ),
    Plot(
        "met",
        (
            "{when}, {hero} heard {noise} {hidden}.",
            "{he} [looked closer|went to look|walked closer] and saw {friend_full}.",
            "{friend} was stuck[| and could not move].",
            '"[Please help me|Help me, please|Please, come and help me]!" cried {friend}.',
            '"[Do not worry|Do not be sad|Do not cry]," said {hero}.',
            "{hero} pulled and pulled[|, but nothing happened].",
            "[Then|At last|In the end], {friend} was free.",
            '"[Thank you|Thank you so much|Oh, thank you]," said {friend}. "You are [very |so |][kind|brave|strong]."',
        ),
        "it is good to help others",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} had a [big|sweet|fresh] {food}.",
            "{friend} had [nothing to eat|no food|only a small piece of bread].",
            '"[I am hungry|I am so hungry|That looks good]," said {friend}.',
            "{hero} [thought for a moment|looked at the {food}|thought about it].",
            "[Then|So] {he} cut the {food} in two and gave {friend} [half|the bigger piece].",
            "?They sat down {hidden} and ate [together|slowly|it all up].",
            (
                '"[This is the best|What a good|This is a very good] {food}!" said {friend}[| happily| '
                "softly| with a smile]."
            ),
        ),
        "it is good to share",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} and {friend} went {place2}.",
            "[Suddenly|Then|Soon], [dark clouds came|it began to rain|the wind began to blow].",
            '"[We must hide|We must find a dry place|Run, run]!" [cried|shouted] {friend}.',
            "They ran [as fast as they could|very fast|through the rain] and hid {hidden}.",
            "?{hero} was [cold and wet|a little afraid|very cold].",
            "[They told stories|They sang a song|They waited and waited] until the [rain|storm] stopped.",
            "[Then|After that], a [big|bright|beautiful] rainbow [came out|was in the sky].",
            '"[Look at that|Look, a rainbow|How beautiful]!" said {hero}.',
        ),
        "after the rain comes the sun",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} wanted to build {build}.",
            '"[That is too hard|You cannot do that|That will take a long time]," said {friend}.',
            "But {hero} [did not give up|wanted to try|was not afraid to try].",
            "{he} [found|took|got] some {parts} and began to work.",
            "?[First|At first], the {built} fell down.",
            "?{hero} tried again and again.",
            "[After {number} days|In the evening|At last], the {built} was ready.",
            (
                '"[It is wonderful|You did it|I was wrong]!" said {friend}. "[Can I help next time|Can we '
                'play with it|Will you show me how]?"'
            ),
        ),
        "you should never give up",
    ),
    Plot(
        "",
        (
            "{when}, {hero} was in bed and heard {noise}.",
            "{he} was [very |so |a little ][afraid|scared].",
            '"[Who is there|What is that]?" {he} [whispered|asked].',
            "[Nobody answered|There was no answer].",
            "{hero} [took {his} lamp|took a deep breath|got up] and went to look.",
            "The {sound} came from [the kitchen|behind the door|the garden|the window].",
            "It was {cause}!",
            "{hero} laughed and went back to bed.",
        ),
        "there is no need to be afraid of the dark",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} and {friend} had a race.",
            '"I will [win|be first]," said {friend}[| happily| softly| with a smile].',
            (
                "They ran [past the pond|over the bridge|around the big tree|up the hill] and [down the "
                "road|through the field|along the river]."
            ),
            "[Suddenly|Then], {friend} fell and hurt {fhis} [leg|foot].",
            "{hero} stopped [at once|to help {fhim}].",
            '"[Are you all right|Can you walk|Does it hurt]?" {he} asked.',
            '"[You could win|You are a good friend|Why did you stop]," said {friend}.',
            '"[You are more important than a race|A friend is better than a prize]," said {hero}.',
        ),
        "a friend is better than a prize",
    ),
    Plot(
        "",
        (
            "{when}, {hero} wanted to [bake|make] a {flavor} {dish} for {his} {family}.",
            "{he} took some [flour|sugar|butter] and {number} [eggs|cups of milk|spoons of honey].",
            "?{he} made a [big|terrible|funny] mess in the kitchen.",
            "Soon the [house|kitchen] smelled [very |so |]good.",
            "{his} {family} came in and [smiled|laughed|looked surprised].",
            '"[Is this for me|What is this|Did you make this]?" asked {his} {family}.',
            '"[Yes, it is for you|Yes, I made it for you|Happy birthday]!" said {hero}.',
            "They [sat down and ate|ate the {dish}] together.",
        ),
        "a gift made by hand is the best gift",
    ),
    Plot(
        "",
        (
            "{when}, {hero} found a [tiny|small|little] seed {hidden}.",
            "{he} put it [in the ground|in the garden|in a pot] and gave it [water|some water].",
            "Every day, {he} [looked at it|gave it water|sat next to it] and waited.",
            '"[When will it grow|Why does it not grow]?" {he} asked {his} {family}.',
            '"[You must be patient|Give it some time|Wait a little longer]," said {his} {family}.',
            "After {number} [days|weeks], [a green leaf came up|there was a small green plant].",
            "[In the summer|In the spring|Soon], it was a [big|tall|beautiful] {color} {flower}.",
        ),
        "good things take time",
    ),
    Plot(
        "",
        (
            "{when}, {hero} went to the market with {his} {family}.",
            "They [bought|wanted to buy] some {fruit} and some {fruit2}.",
            "[Suddenly|Then], {hero} saw a {thing2}.",
            '"[Can I have it|May I have that {toy2}|Please, can we buy it]?" {he} asked.',
            (
                '"[Yes, if you help me|Yes, but you must take care of it|Not today, but maybe on your '
                'birthday]," said {his} {family}.'
            ),
            "{hero} carried the [heavy |big |]basket all the way home.",
            (
                '"[You are a good helper|I am proud of you|Well done]," said {his} {family}[| happily| '
                "softly| with a smile]."
            ),
        ),
        "it is good to help at home",
    ),
    Plot(
        "known",
        (
            "{when}, {friend} was sick and had to stay in bed.",
            "{hero} was [worried|sad].",
            '"[What can I do|How can I help]?" {he} asked {his} {family}.',
            '"[Bring {fhim} some {soup}|You can take {fhim} some {soup}]," said {his} {family}.',
            "So {hero} took the {soup} and went to {fhis} house.",
            "?{he} also brought [a {thing2}|a {color} {flower}].",
            '"[How kind of you|You are so kind|I feel better now]," said {friend}.',
            "[The next day|After {number} days|Soon], {friend} was [well|healthy|strong] again.",
        ),
        "a kind heart can make others feel better",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} and {friend} played hide and seek {place_in}.",
            "{friend} closed {fhis} eyes and counted to ten.",
            "{hero} hid {hidden}.",
            '"[Where are you|Are you near|Can you hear me]?" called {friend}.',
            "{friend} looked {hidden2}, but {hero} was not there.",
            "[Then|Suddenly|But then], {hero} [sneezed|laughed|began to laugh].",
            '"[Found you|There you are|I can hear you]!" [cried|shouted] {friend}.',
            "They [both laughed|laughed and laughed] and played again.",
        ),
        "it is fun to play together",
    ),
    Plot(
        "",
        (
            "{when}, {hero} broke {his} {family}'s [cup|lamp|plate|window].",
            "{he} was [afraid|scared] to tell anyone.",
            "?{he} hid {hidden} and cried.",
            "[But then|In the evening|After a while], {he} went to {his} {family}.",
            (
                '"[I am sorry|I am so sorry|It was me]," {he} said. "[It was an accident|I did not want to '
                'break it|I was not careful]."'
            ),
            "{his} {family} [hugged|looked at|smiled at] {him}.",
            '"[Thank you for telling me|I am glad that you told me|It is only a thing]," said {his} {family}.',
        ),
        "it is good to tell the truth",
    ),
    Plot(
        "met",
        (
            "{when}, {hero} [got lost|lost {his} way] {place_in}.",
            "[It was getting dark|The sun went down|All the trees looked the same].",
            "{hero} sat down {hidden} and [cried|began to cry].",
            "Then {friend_full} came by.",
            '"[Why do you cry|Are you lost|What is wrong]?" asked {friend}.',
            '"I [cannot find my way home|want to go home|do not know the way]," said {hero}.',
            '"[Follow me|Come with me|I know the way]," said {friend}.',
            (
                "They walked [together|for a long time|past the pond and over the bridge] until they saw "
                "the [house|light in the window]."
            ),
            '"[Thank you|Thank you so much|Oh, thank you]!" said {hero}.',
        ),
        "you can always ask for help",
    ),
    Plot(
        "",
        (
            "{when}, {hero} [wanted to|tried to] catch [the moon|a star|a cloud].",
            "{he} climbed [a tall tree|the highest hill|onto the roof] and [reached out|jumped up high].",
            "But it was too [far away|high up].",
            '"[I cannot do it|It is too far away|I am too small]," {he} said [sadly|quietly].',
            '"[Look down|Look at the water|Look into the pond]," said {his} {family}.',
            "There, in the [water|pond|lake], [{he} saw the whole sky|was the sky with all its lights].",
            "{hero} [smiled|laughed|clapped and laughed].",
        ),
        "beautiful things can be very near",
    ),
    Plot(
        "known",
        (
            "{when}, {hero} and {friend} both wanted the same {thing2}.",
            '"It is mine!" [cried|shouted] {hero}.',
            '"No, it is mine!" [cried|shouted] {friend}.',
            "They pulled and pulled, and the {toy2} broke.",
            "Now [they were both sad|nobody could play with it].",
            '"[I am sorry|I was wrong|I should share]," said {hero}.',
            '"[I am sorry too|So am I|Let us fix it together]," said {friend}.',
            "They [fixed|mended] the {toy2} and played [together|in turns].",
        ),
        "it is better to share than to fight",
    ),
    Plot(
        "known",
        (
            "{when}, it was {hero}'s birthday.",
            "?{he} woke up [early|with a smile].",
            "But [nobody said a word|everyone was busy|the house was empty].",
            "{hero} [thought that everyone forgot it|was sad and went {place2}|sat down {hidden}].",
            "[In the afternoon|Later|Then], {friend} came and took {him} home.",
            '"Surprise!" [everyone cried|everyone shouted|cried all {his} friends].',
            "There was a [big|huge] {flavor} cake and a {thing2}.",
            '"[This is the best day|I am so happy|Thank you all]!" said {hero}.',
        ),
        "good friends do not forget you",
    ),
    Plot(
        "",
        (
            "{when}, {hero} wanted to learn to [swim|dance|read|sing|whistle|skate].",
            "{his} {family} [showed {him} how|helped {him}].",
            "At first, it was [very |so |]hard[|, and {he} wanted to stop].",
            '"[Try again|Do not stop|Just one more time]," said {his} {family}.',
            "{hero} tried [again|once more|every day].",
            "[After {number} days|In the end|One day], {he} could do it[| all alone| very well].",
            '"[Look at me|I can do it|I did it]!" {he} [cried|shouted] [happily|softly|with a smile].',
        ),
        "you get better when you try",
    ),
    Plot(
        "met",
        (
            "One cold {part}, it [was snowing|began to snow].",
            "Everything was [white and quiet|cold and white].",
            "{hero} found {friend_full} {hidden}.",
            "{friend} was [very |so |]cold.",
            '"[Come to my house|Come in|You can stay with me]," said {hero}.',
            "{he} gave {friend} [a {color} blanket|some {soup}|a warm place by the fire].",
            '"[Now I am warm|It is so nice here|I feel much better]," [said|answered|whispered] {friend}.',
            "They [sat by the fire|told stories|watched the snow] [all night|all evening|together].",
        ),
        "a warm heart is good in the winter",
    ),
    Plot(
        "",
        (
            "{when}, {hero} found a [strange|small|mysterious] map {indoors}.",
            "{he} followed it {place2} and then {place3}.",
            "[There|At the end of the path], {he} dug a [deep|big] hole.",
            "{he} found [an old|a heavy|a wooden] box.",
            "Inside, there [was a {thing2}|were {number} {color} stones|was a golden key].",
            '"[What a treasure|I found a treasure|Now I am rich]!" [said|cried] {hero}.',
            "{he} [showed it to|gave it to] {his} {family}.",
        ),
        "curious eyes find many treasures",
    ),
)

ENDINGS = (
    "{hero} was [very |so |][happy|proud].",
    "{hero} felt [very |so |][happy|glad].",
    "[That night|In the evening], {hero} [slept well|fell asleep with a smile|dreamed of the stars].",
    "It was [a good day|the best day of all|a day to remember].",
    "{hero} told {his} {family} all about it.",
)
FRIEND_ENDINGS = (
    "From that day on, {hero} and {friend} were [best|good|the best of] friends.",
    "[They were both [very |so |]happy|The two friends were [very |]happy].",
    "After that, they [played together|met] every day.",
    "They lived happily ever after.",
)
MORALS = (
    "{he} learned that {moral}.",
    "Now {he} [knew|understood] that {moral}.",
    "And so {hero} learned that {moral}.",
)
